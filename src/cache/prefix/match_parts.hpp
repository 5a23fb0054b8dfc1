// What a prefix's blocks are, and what a match found of them.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

namespace kvx::cache {

enum class BlockKind : uint8_t { kPacked, kFullPrecision };

// What a match found for one layer group: blocks [0, first_block) are not needed any more, but for
// sinks, as a sliding window has passed them; [first_recent_block, end) are full-precision, and so
// are the head blocks.
struct GroupMatch {
  int64_t first_block = 0;
  int64_t first_recent_block = 0;
};

// Blocks that no index has yet and one sequence may use: their ids, by node, group and kind.
class ComingBlocks {
 public:
  void add(int32_t node, int group, BlockKind kind, int32_t id) { ids_[{node, group, kind}] = id; }
  // kNoBlock, -1: there is none.
  int32_t find(int32_t node, int group, BlockKind kind) const {
    const auto found = ids_.find({node, group, kind});
    return found == ids_.end() ? -1 : found->second;
  }

 private:
  std::map<std::tuple<int32_t, int, BlockKind>, int32_t> ids_;
};

}  // namespace kvx::cache
