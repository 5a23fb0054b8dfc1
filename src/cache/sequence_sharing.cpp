// Sequence: blocks that several sequences use: forks, prefixes, and the copy before a write.
#include <algorithm>

#include "cache/sequence.hpp"

namespace kvx::cache {

// ---- copies before a write

bool Sequence::must_copy_open_block(const BlockPool& pool, int group) const {
  if (num_tokens_ % block_size() == 0) return false;
  const int64_t open = num_tokens_ / block_size();
  const int block_class = class_of(group, open);
  const int32_t id = groups_[group].table[open];
  return pool.use_count(block_class, id) > 1 || pool.is_kept(block_class, id);
}

Status Sequence::acquire_copies(BlockPool& pool, std::vector<OpenBlockCopy>& copies) {
  std::fill(needed_.begin(), needed_.end(), 0);
  for (int group = 0; group < num_groups(); ++group) {
    if (must_copy_open_block(pool, group)) ++needed_[class_of(group, num_tokens_ / block_size())];
  }
  KVX_RETURN_IF_ERROR(check_needed(pool));
  for (int group = 0; group < num_groups(); ++group) {
    if (!must_copy_open_block(pool, group)) continue;
    OpenBlockCopy copy;
    copy.group = group;
    copy.block = num_tokens_ / block_size();
    copy.block_class = class_of(group, copy.block);
    copy.from_id = groups_[group].table[copy.block];
    copy.num_tokens = static_cast<int>(num_tokens_ % block_size());
    KVX_RETURN_IF_ERROR(pool.allocate(copy.block_class, std::span(&copy.to_id, 1)));
    copies.push_back(copy);
  }
  return {};
}

Status Sequence::commit_copies(BlockPool& pool, std::span<const OpenBlockCopy> copies) {
  for (const OpenBlockCopy& copy : copies) {
    groups_[copy.group].table.replace(copy.block, copy.to_id);
    KVX_RETURN_IF_ERROR(pool.release(copy.block_class, copy.from_id));
  }
  return {};
}

// ---- forks and prefixes

Status Sequence::check_empty() const {
  for (const GroupState& state : groups_) {
    if (state.table.size() == 0) continue;
    return invalid_argument("the sequence has {} tokens and {} blocks; expected an empty one",
                            num_tokens_, state.table.size());
  }
  return {};
}

// One more user of every block in the group's table; all or none.
Status Sequence::retain_blocks(BlockPool& pool, int group) {
  const GroupState& state = groups_[group];
  for (int64_t block = 0; block < state.table.size(); ++block) {
    if (is_released(group, block)) continue;
    const Status retained = pool.retain(class_of(group, block), state.table[block]);
    if (retained.ok()) continue;
    while (--block >= 0) {
      if (is_released(group, block)) continue;
      KVX_RETURN_IF_ERROR(pool.release(class_of(group, block), state.table[block]));
    }
    return retained;
  }
  return {};
}

Status Sequence::share(BlockPool& pool, const Sequence& other) {
  std::vector<GroupPrefix> prefixes;
  const auto num_blocks = static_cast<size_t>(blocks_for(other.num_tokens_, other.block_size()));
  for (int group = 0; group < other.num_groups(); ++group) {
    const GroupState& state = other.groups_[group];
    prefixes.push_back({{state.table.data(), num_blocks},
                        std::min<int64_t>(state.first_block, static_cast<int64_t>(num_blocks)),
                        state.first_recent_block});
  }
  return adopt(pool, other.num_tokens_, prefixes);
}

Status Sequence::adopt(BlockPool& pool, int64_t num_tokens, std::span<const GroupPrefix> prefixes) {
  KVX_RETURN_IF_ERROR(check_empty());
  if (static_cast<int>(prefixes.size()) != num_groups()) {
    return invalid_argument("{} prefixes are given; expected one a layer group, {}",
                            prefixes.size(), num_groups());
  }
  if (num_tokens < 0 || num_tokens > max_tokens()) {
    return invalid_argument("num_tokens is {}; expected 0 to {}", num_tokens, max_tokens());
  }
  const int64_t num_blocks = blocks_for(num_tokens, block_size());
  for (int group = 0; group < num_groups(); ++group) {
    const GroupPrefix& prefix = prefixes[group];
    const auto num_ids = static_cast<int64_t>(prefix.ids.size());
    if (num_ids == num_blocks && prefix.first_block >= 0 && prefix.first_block <= num_blocks) {
      continue;
    }
    return invalid_argument("layer group {} begins with {} blocks from {} on; {} tokens need {}",
                            group, num_ids, prefix.first_block, num_tokens, num_blocks);
  }
  for (int group = 0; group < num_groups(); ++group) {
    const GroupPrefix& prefix = prefixes[group];
    GroupState& state = groups_[group];
    state.first_block = prefix.first_block;
    for (int64_t block = 0; block < num_blocks; ++block) {
      state.table.push(is_released(group, block) ? kNoBlock : prefix.ids[block]);
    }
    state.first_recent_block =
        std::max(prefix.first_recent_block, shape_.groups[group].full_precision_window.sink_blocks);
    const Status retained = retain_blocks(pool, group);
    if (retained.ok()) continue;
    groups_[group] = empty_state(group);
    for (int done = 0; done < group; ++done) KVX_RETURN_IF_ERROR(drop_blocks(pool, done, 0));
    return retained;
  }
  num_tokens_ = num_tokens;
  return {};
}

}  // namespace kvx::cache
