// Ring: where tokens lie in a contiguous cache that keeps the last `window` tokens of a sequence.
// Exact: slot = position % window; a write of more than window tokens keeps the last window.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvx::cache {

// Requires: position >= 0, window > 0.
constexpr int64_t ring_slot(int64_t position, int64_t window) {
  return position % window;
}

// Tokens held after num_tokens were written.
constexpr int64_t ring_size(int64_t num_tokens, int64_t window) {
  return std::min(num_tokens, window);
}

// The position of the token in `slot` after num_tokens were written, or -1 when it is empty.
// Requires: 0 <= slot < window.
constexpr int64_t ring_position(int64_t slot, int64_t num_tokens, int64_t window) {
  if (slot >= num_tokens) return -1;
  // The newest position p < num_tokens with p % window == slot.
  return (num_tokens - 1 - slot) / window * window + slot;
}

// A write of consecutive tokens: the first num_dropped do not survive it, the others go to at most
// two runs of slots.
struct RingRun {
  int64_t first_token = 0;  // counted from the write's first
  int64_t first_slot = 0;
  int64_t num_tokens = 0;  // 0: no such run
};
struct RingWrite {
  int64_t num_dropped = 0;
  RingRun runs[2];
};

// Tokens [first_position, first_position + num_tokens). Requires: window > 0, the others >= 0.
constexpr RingWrite ring_write(int64_t first_position, int64_t num_tokens, int64_t window) {
  RingWrite write;
  write.num_dropped = std::max<int64_t>(num_tokens - window, 0);
  const int64_t num_kept = num_tokens - write.num_dropped;
  const int64_t slot = ring_slot(first_position + write.num_dropped, window);
  const int64_t before_end = std::min(num_kept, window - slot);
  write.runs[0] = {write.num_dropped, slot, before_end};
  write.runs[1] = {write.num_dropped + before_end, 0, num_kept - before_end};
  return write;
}

}  // namespace kvx::cache
