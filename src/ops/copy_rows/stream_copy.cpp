// Copies that bypass the caches, line by line.
#include "ops/copy_rows/stream_copy.hpp"

#include <cstring>

#include "device/cpu_level.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvx::ops::copy_rows {

#if defined(__x86_64__)

namespace {

constexpr int64_t kLine = 64;

__attribute__((target("avx512f"))) void stream_line_avx512(uint8_t* to, const uint8_t* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

void stream_line_sse2(uint8_t* to, const uint8_t* from) {
  for (int i = 0; i < kLine; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
}

// Bytes before the target's first whole line and after its last one are copied with memcpy.
#define KVX_STREAM_COPY(name, line)                                                              \
  void name(uint8_t* to, const uint8_t* from, int64_t bytes) {                                   \
    const int64_t before = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(to)) & (kLine - 1); \
    const int64_t head = before < bytes ? before : bytes;                                        \
    memcpy(to, from, static_cast<size_t>(head));                                                 \
    int64_t at = head;                                                                           \
    for (; at + kLine <= bytes; at += kLine) line(to + at, from + at);                           \
    memcpy(to + at, from + at, static_cast<size_t>(bytes - at));                                 \
  }

__attribute__((target("avx512f"))) KVX_STREAM_COPY(stream_avx512, stream_line_avx512)
    KVX_STREAM_COPY(stream_sse2, stream_line_sse2)

}  // namespace

StreamCopy stream_copy() {
  static const bool has_avx512 = device::supports(device::CpuLevel::kAvx512);
  return has_avx512 ? stream_avx512 : stream_sse2;
}

void stream_units(uint8_t* to, const uint8_t* from, int64_t from_stride, int64_t count) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(to) % kStreamedUnitBytes == 0;
  for (int64_t i = 0; i < count; ++i) {
    const __m128i unit = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
    auto* target = reinterpret_cast<__m128i*>(to + i * kStreamedUnitBytes);
    is_aligned ? _mm_stream_si128(target, unit) : _mm_storeu_si128(target, unit);
  }
}

void finish_streams() {
  _mm_sfence();
}

#else

StreamCopy stream_copy() {
  return nullptr;
}
void stream_units(uint8_t*, const uint8_t*, int64_t, int64_t) {}
void finish_streams() {}

#endif

}  // namespace kvx::ops::copy_rows
