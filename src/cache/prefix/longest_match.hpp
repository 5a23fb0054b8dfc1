// longest_match: how many blocks of a prefix all layer groups can serve, whoever has its blocks:
// one index, or several tiers together.
#pragma once

#include <algorithm>
#include <vector>

#include "cache/prefix/match_parts.hpp"
#include "cache/sequence.hpp"

namespace kvx::cache {

// Crosses out the lengths that a group cannot serve. A match of n blocks needs, of its sinks and of
// those that its window still sees, the head's full-precision, the others packed; its last ones may
// be full-precision instead, as many as the recent window holds. has(block, kind).
template <class Has>
void cross_out(const LayerGroup& facts, int64_t block_size, int64_t num_blocks, const Has& has,
               std::vector<uint8_t>& fits) {
  const FullPrecisionWindow& in_full = facts.full_precision_window;
  int64_t full_precision_run = 0;    // full-precision blocks in a row that end at n
  int64_t last_sink_missing = -1;    // of the head blocks before n
  int64_t last_packed_missing = -1;  // of the blocks before `seen`
  bool is_sink_missing = false;
  int64_t seen = 0;
  for (int64_t n = 1; n <= num_blocks; ++n) {
    const bool is_full_precision = in_full.is_on() && has(n - 1, BlockKind::kFullPrecision);
    full_precision_run = is_full_precision ? full_precision_run + 1 : 0;
    if (n <= in_full.sink_blocks && !is_full_precision) last_sink_missing = n - 1;
    if (n <= facts.window_sink_blocks) {  // then they are among the full-precision sinks
      const BlockKind kind = in_full.is_on() ? BlockKind::kFullPrecision : BlockKind::kPacked;
      is_sink_missing = is_sink_missing || !has(n - 1, kind);
    }
    const int64_t first = expired_blocks(n * block_size, facts.window, block_size);
    const int64_t first_packed = std::max(first, in_full.sink_blocks);
    const int64_t tail =
        std::max(first_packed, n - std::min(full_precision_run, in_full.recent_blocks));
    for (; seen < std::min(tail, n); ++seen) {  // the tail never goes back
      if (!has(seen, BlockKind::kPacked)) last_packed_missing = seen;
    }
    if (is_sink_missing || last_sink_missing >= first || last_packed_missing >= first_packed) {
      fits[n] = 0;
    }
  }
}

// What a match of num_blocks blocks reads of a group.
template <class Has>
GroupMatch group_match(const LayerGroup& facts, int64_t block_size, int64_t num_blocks,
                       const Has& has) {
  const FullPrecisionWindow& in_full = facts.full_precision_window;
  GroupMatch found;
  found.first_block = expired_blocks(num_blocks * block_size, facts.window, block_size);
  const int64_t first_packed = std::max(found.first_block, in_full.sink_blocks);
  found.first_recent_block = num_blocks;
  while (found.first_recent_block > first_packed &&
         num_blocks - found.first_recent_block < in_full.recent_blocks &&
         has(found.first_recent_block - 1, BlockKind::kFullPrecision)) {
    --found.first_recent_block;
  }
  found.first_recent_block = std::max(found.first_recent_block, first_packed);
  return found;
}

// The longest beginning of num_blocks blocks that every group can serve, and what it reads of each.
// has(block, group, kind); fits is scratch. Requires: a place in groups for each group.
template <class Has>
int64_t longest_match(const SequenceShape& shape, int64_t num_blocks, const Has& has,
                      std::vector<uint8_t>& fits, std::vector<GroupMatch>& groups) {
  fits.assign(static_cast<size_t>(num_blocks) + 1, 1);
  const auto of_group = [&has](int group) {
    return [&has, group](int64_t block, BlockKind kind) { return has(block, group, kind); };
  };
  const auto num_groups = static_cast<int>(shape.groups.size());
  for (int group = 0; group < num_groups; ++group) {
    cross_out(shape.groups[group], shape.block_size, num_blocks, of_group(group), fits);
  }
  while (fits[num_blocks] == 0) --num_blocks;  // an empty match always fits
  for (int group = 0; group < num_groups; ++group) {
    groups[group] = group_match(shape.groups[group], shape.block_size, num_blocks, of_group(group));
  }
  return num_blocks;
}

}  // namespace kvx::cache
