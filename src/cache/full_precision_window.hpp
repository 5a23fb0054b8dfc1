// FullPrecisionWindow: which blocks of a sequence are kept in 16 bits and which are packed. Pure
// integers.
//
//   block   0 .. sink_blocks      | sink_blocks .. tail | tail .. end
//           full precision: sinks | packed              | full precision: recent tokens, the open
//                                                         block last
//
// With n tokens in the cache, end = ceil(n / block_size) and tail = max(sink_blocks, end -
// recent_blocks). A block is packed once, whole, when the first token of the block that is
// recent_blocks after it is appended. So a query sees at least (recent_blocks - 1) * block_size
// tokens in full precision before its own, and at most block_size - 1 more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/checked.hpp"
#include "core/result.hpp"

namespace kvx::cache {

// recent_blocks 0: off, every block is packed and append is immediate.
struct FullPrecisionWindow {
  int64_t sink_blocks = 0;    // the sequence's first
  int64_t recent_blocks = 0;  // its last, the open one included

  bool is_on() const { return recent_blocks > 0; }
};

// The first sink_tokens, rounded up to whole blocks, and so many blocks that every query sees at
// least the recent_tokens before its own in full precision: recent_tokens rounded up to whole
// blocks, and the open block. A block is packed only when all of its tokens are more than
// recent_tokens before the query's. INVALID_ARGUMENT: a negative number, or block_size < 1.
Result<FullPrecisionWindow> make_full_precision_window(int64_t sink_tokens, int64_t recent_tokens,
                                                       int64_t block_size);

// Blocks that hold num_tokens. Requires: num_tokens >= 0, block_size > 0.
constexpr int64_t blocks_for(int64_t num_tokens, int64_t block_size) {
  return num_tokens / block_size + (num_tokens % block_size != 0);
}

// The first recent block when tokens [0, num_tokens) are in the cache. While the window is off, the
// end.
inline int64_t first_recent_block_of(const FullPrecisionWindow& window, int64_t num_tokens,
                                     int64_t block_size) {
  return std::max(window.sink_blocks, blocks_for(num_tokens, block_size) - window.recent_blocks);
}

// The block that leaves the window when the token at `position` is appended; nothing while the
// window is off.
std::optional<int64_t> block_leaving_window(const FullPrecisionWindow& window, int64_t position,
                                            int64_t block_size);

struct BlockCounts {
  int64_t packed = 0;
  int64_t full_precision = 0;
};
// How the blocks of a sequence of num_tokens are stored; those before first_block are released.
// Requires: first_block <= blocks_for(num_tokens, block_size).
// With first_block 0 neither number shrinks while a sequence grows: they are also the most that it
// holds on the way.
BlockCounts count_blocks(const FullPrecisionWindow& window, int64_t num_tokens, int64_t block_size,
                         int64_t first_block = 0);

// How many leading blocks of a sliding-window layer no query at first_query or later reads: all of
// their tokens are at least `window` before it. window 0: none.
constexpr int64_t expired_blocks(int64_t first_query, int64_t window, int64_t block_size) {
  if (window == 0 || first_query < window) return 0;
  return (first_query - window + 1) / block_size;
}

// The most blocks that a sequence of such a layer holds when it releases the expired ones before
// each append of at most tokens_at_once. Requires: window > 0, the others > 0.
constexpr int64_t most_window_blocks(int64_t window, int64_t tokens_at_once, int64_t block_size) {
  // window - 1 old tokens and the new ones are neighbours; the first may be a block's last.
  return (window - 1 + tokens_at_once + block_size - 2) / block_size + 1;
}

}  // namespace kvx::cache
