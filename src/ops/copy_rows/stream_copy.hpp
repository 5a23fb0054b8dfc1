// Copies that go past the caches: for calls that move more than a core's caches hold.
#pragma once

#include <cstdint>

namespace kvx::boundary {

// A plain copy first reads every line that it will overwrite; from this size of a call on, going
// past the caches is faster (measured: 8 MiB 1.2 times, 1 MiB 0.75 times).
inline constexpr int64_t kStreamedCallBytes = int64_t{4} << 20;
// Shorter runs leave too many lines half written.
inline constexpr int64_t kStreamedRunBytes = 128;

using StreamCopy = void (*)(uint8_t* to, const uint8_t* from, int64_t bytes);

// This machine's copy past the caches; null where there is none. Any alignment.
StreamCopy stream_copy();

// `count` units of 16 bytes, from_stride apart, to one place after the other, as HND_PACKED has its
// packs. Requires: stream_copy() is not null.
inline constexpr int64_t kStreamedUnitBytes = 16;
void stream_units(uint8_t* to, const uint8_t* from, int64_t from_stride, int64_t count);

// Makes what was streamed visible to other threads, as plain stores are.
void finish_streams();

}  // namespace kvx::boundary
