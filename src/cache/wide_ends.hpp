// Wide ends: which blocks of a sequence are kept in 16 bits and which are packed. Pure integers.
//
//   block   0 .. head_blocks | head_blocks .. tail | tail .. end
//           wide: sinks      | packed              | wide: the recent window, the open block last
//
// With n tokens in the cache, end = ceil(n / block_size) and tail = max(head_blocks, end -
// recent_blocks). A block is packed once, whole, when it leaves the window.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/checked.hpp"
#include "core/result.hpp"

namespace kvx::cache {

// recent_blocks 0: off, every block is packed and append is immediate.
struct WideEnds {
  int64_t head_blocks = 0;
  int64_t recent_blocks = 0;

  bool is_on() const { return recent_blocks > 0; }
};

// The first sink_tokens and the last recent_tokens, each rounded up to whole blocks; the open block
// is always wide. INVALID_ARGUMENT: a negative number, or block_size < 1.
Result<WideEnds> make_wide_ends(int64_t sink_tokens, int64_t recent_tokens, int64_t block_size);

// Blocks that hold num_tokens. Requires: num_tokens >= 0, block_size > 0.
constexpr int64_t blocks_for(int64_t num_tokens, int64_t block_size) {
  return num_tokens / block_size + (num_tokens % block_size != 0);
}

// The first block of the recent window when tokens [0, num_tokens) are in the cache. With wide ends
// off, the end.
inline int64_t wide_tail_block(const WideEnds& ends, int64_t num_tokens, int64_t block_size) {
  return std::max(ends.head_blocks, blocks_for(num_tokens, block_size) - ends.recent_blocks);
}

// The block that leaves the window when the token at `position` is appended; nothing while wide
// ends are off.
std::optional<int64_t> block_leaving_window(const WideEnds& ends, int64_t position,
                                            int64_t block_size);

struct BlockCounts {
  int64_t packed = 0;
  int64_t wide = 0;
};
// How a sequence of num_tokens is stored.
BlockCounts count_blocks(const WideEnds& ends, int64_t num_tokens, int64_t block_size);
// The most that it ever holds of each kind while it grows to num_tokens.
BlockCounts most_blocks(const WideEnds& ends, int64_t num_tokens, int64_t block_size);

// How many leading blocks of a sliding-window layer no query at first_query or later reads: all of
// their tokens are at least `window` before it. window 0: none.
constexpr int64_t expired_blocks(int64_t first_query, int64_t window, int64_t block_size) {
  if (window == 0 || first_query < window) return 0;
  return (first_query - window + 1) / block_size;
}

}  // namespace kvx::cache
