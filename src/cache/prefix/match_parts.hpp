// What a prefix's blocks are, and what a match found of them.
#pragma once

#include <cstdint>

namespace kvx::cache {

enum class BlockKind : uint8_t { kPacked, kFullPrecision };

// What a match found for one layer group: blocks [0, first_block) are not needed any more, but for
// sinks, as a sliding window has passed them; [first_recent_block, end) are full-precision, and so
// are the head blocks.
struct GroupMatch {
  int64_t first_block = 0;
  int64_t first_recent_block = 0;
};

}  // namespace kvx::cache
