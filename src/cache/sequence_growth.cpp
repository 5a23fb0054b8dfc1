// Sequence: blocks for new tokens, acquired before anything is written, committed when all is.
#include <algorithm>
#include <cassert>

#include "cache/sequence.hpp"

namespace kvx::cache {

// ---- what a growth needs

Status Sequence::check_append(const BlockPool& pool, int64_t num_tokens) const {
  if (static_cast<size_t>(pool.num_classes()) < needed_.size()) {
    return invalid_argument("the pool has {} classes; the sequence takes blocks of {}",
                            pool.num_classes(), needed_.size());
  }
  if (num_tokens < 1) return invalid_argument("num_tokens is {}; expected 1 or more", num_tokens);
  if (num_tokens > max_tokens() - num_tokens_) {
    return out_of_range("{} tokens after {} go beyond max_tokens {}", num_tokens, num_tokens_,
                        max_tokens());
  }
  return {};
}

// The open block may be copied to one of the sequence's own; a block that the growth writes is.
void Sequence::add_needed_blocks(const BlockPool& pool, int64_t num_tokens,
                                 std::span<int64_t> needed) const {
  const int64_t end = blocks_for(num_tokens_ + num_tokens, block_size());
  const int64_t num_full = num_tokens_ / block_size();
  for (int group = 0; group < num_groups(); ++group) {
    if (must_copy_open_block(pool, group)) ++needed[class_of(group, num_full)];
    const BlockTable& table = groups_[group].table;
    const FullPrecisionWindow& window = shape_.groups[group].full_precision_window;
    needed[entering_class(group)] += end - table.size();
    if (!window.is_on()) continue;
    const LayerGroup& facts = shape_.groups[group];
    const int64_t first_leaving = groups_[group].first_recent_block;
    const int64_t end_leaving = std::max(
        first_leaving, first_recent_block_of(window, num_tokens_ + num_tokens, block_size()));
    needed[facts.packed_class] += end_leaving - first_leaving;
    for (int64_t block = first_leaving; block < end_leaving; ++block) {
      const bool is_own =
          block >= num_full || pool.use_count(facts.full_precision_class, table[block]) == 1;
      if (is_own) --needed[facts.full_precision_class];  // its place is the entering block's
    }
  }
}

int Sequence::entering_class(int group) const {
  const LayerGroup& facts = shape_.groups[group];
  return facts.full_precision_window.is_on() ? facts.full_precision_class : facts.packed_class;
}

// ---- acquiring

Status Sequence::acquire(BlockPool& pool, int64_t num_tokens, SequenceGrowth& growth) {
  KVX_RETURN_IF_ERROR(check_append(pool, num_tokens));
  std::fill(needed_.begin(), needed_.end(), 0);
  add_needed_blocks(pool, num_tokens, needed_);
  KVX_RETURN_IF_ERROR(check_needed(pool));
  for (int c = 0; c < static_cast<int>(needed_.size()); ++c) {
    spare_[c] = pool.num_available(c) - needed_[c];
  }
  return acquire(pool, num_tokens, spare_, growth);
}

Status Sequence::acquire(BlockPool& pool, int64_t num_tokens, std::span<int64_t> spare,
                         SequenceGrowth& growth) {
  KVX_RETURN_IF_ERROR(check_append(pool, num_tokens));
  growth.num_tokens = num_tokens;
  growth.groups.resize(groups_.size());
  growth.copies.clear();
  growth.moves.clear();
  growth.has_moved = false;
  KVX_RETURN_IF_ERROR(acquire_copies(pool, growth.copies));
  for (int group = 0; group < num_groups(); ++group) {
    KVX_RETURN_IF_ERROR(acquire_group(pool, group, spare, growth));
  }
  return {};
}

Status Sequence::acquire_group(BlockPool& pool, int group, std::span<int64_t> spare,
                               SequenceGrowth& growth) {
  const GroupState& state = groups_[group];
  const FullPrecisionWindow& window = shape_.groups[group].full_precision_window;
  const int64_t num_after = num_tokens_ + growth.num_tokens;
  const int64_t end = blocks_for(num_after, block_size());
  GroupGrowth& own = growth.groups[group];
  own.first_leaving = first_recent_block(group);
  own.end_leaving = own.first_leaving;
  if (window.is_on()) {
    own.end_leaving =
        std::max(own.first_leaving, first_recent_block_of(window, num_after, block_size()));
  }
  own.first_block = std::min(own.first_leaving, state.table.size());
  own.ids.assign(state.table.data() + own.first_block, state.table.data() + state.table.size());
  for (const OpenBlockCopy& copy : growth.copies) {
    if (copy.group == group && copy.block >= own.first_block) {
      own.ids[static_cast<size_t>(copy.block - own.first_block)] = copy.to_id;
    }
  }
  own.packed_ids.resize(static_cast<size_t>(own.end_leaving - own.first_leaving));
  KVX_RETURN_IF_ERROR(pool.allocate(shape_.groups[group].packed_class, own.packed_ids));
  for (int64_t block = state.table.size(); block < end; ++block) {
    const int64_t leaving = block - window.recent_blocks;
    int32_t id = kNoBlock;
    if (window.is_on() && own.leaves(leaving) &&
        acquire_place(pool, group, leaving, own.id(leaving), spare)) {
      id = own.id(leaving);
    } else {
      KVX_RETURN_IF_ERROR(pool.allocate(entering_class(group), std::span(&id, 1)));
    }
    own.ids.push_back(id);
  }
  const int64_t end_full = std::min(own.end_leaving, num_tokens_ / block_size());
  for (int64_t block = own.first_leaving; block < end_full; ++block) {
    growth.moves.push_back({group, block, own.id(block), own.packed_id(block)});
  }
  return {};
}

// May a block be written where the leaving block is? Where others use that one, no. Where the
// prefix index keeps it, only if no other place is left: then no new sequence finds it any more.
bool Sequence::acquire_place(BlockPool& pool, int group, int64_t leaving, int32_t id,
                             std::span<int64_t> spare) const {
  if (leaving >= num_tokens_ / block_size()) return true;  // the growth's own, or the open block
  const int block_class = shape_.groups[group].full_precision_class;
  if (pool.use_count(block_class, id) > 1) return false;
  if (!pool.is_kept(block_class, id)) return true;
  if (spare[block_class] > 0) {
    --spare[block_class];
    return false;
  }
  pool.forget(block_class, id);
  return true;
}

// ---- committing

bool Sequence::passes_its_place_on(int group, const GroupGrowth& growth, int64_t block) const {
  const FullPrecisionWindow& window = shape_.groups[group].full_precision_window;
  return growth.id(block + window.recent_blocks) == growth.id(block);
}

// Whether the block leaves with the first new token: nobody reads its full-precision bytes then.
bool Sequence::leaves_first(int group, int64_t block) const {
  const FullPrecisionWindow& window = shape_.groups[group].full_precision_window;
  return block + window.recent_blocks == num_tokens_ / block_size();
}

Status Sequence::commit_moves(BlockPool& pool, SequenceGrowth& growth) {
  growth.has_moved = true;
  KVX_RETURN_IF_ERROR(commit_copies(pool, growth.copies));
  for (const BlockMove& move : growth.moves) {
    GroupState& state = groups_[move.group];
    state.table.replace(move.block, move.packed_id);
    state.first_recent_block = move.block + 1;
    if (!leaves_first(move.group, move.block)) continue;
    if (passes_its_place_on(move.group, growth.groups[move.group], move.block)) continue;
    KVX_RETURN_IF_ERROR(
        pool.release(shape_.groups[move.group].full_precision_class, move.full_precision_id));
  }
  return {};
}

Status Sequence::commit(BlockPool& pool, const SequenceGrowth& growth) {
  for (const BlockMove& move : growth.moves) {
    if (leaves_first(move.group, move.block)) continue;
    if (passes_its_place_on(move.group, growth.groups[move.group], move.block)) continue;
    KVX_RETURN_IF_ERROR(
        pool.release(shape_.groups[move.group].full_precision_class, move.full_precision_id));
  }
  for (int group = 0; group < num_groups(); ++group) commit_group(group, growth);
  num_tokens_ += growth.num_tokens;
  return {};
}

void Sequence::commit_group(int group, const SequenceGrowth& growth) {
  GroupState& state = groups_[group];
  const GroupGrowth& own = growth.groups[group];
  const int64_t end = own.first_block + std::ssize(own.ids);
  for (int64_t block = num_tokens_ / block_size(); block < end; ++block) {
    const int32_t id = own.leaves(block)          ? own.packed_id(block)
                       : block >= own.first_block ? own.id(block)
                                                  : state.table[block];
    if (block < state.table.size()) {
      state.table.replace(block, id);
    } else {
      state.table.push(id);
    }
  }
  if (!shape_.groups[group].full_precision_window.is_on()) return;
  state.first_recent_block = std::max(state.first_recent_block, own.end_leaving);
}

Status Sequence::cancel(BlockPool& pool, const SequenceGrowth& growth) {
  const int64_t num_full = num_tokens_ / block_size();
  for (int group = 0; group < num_groups(); ++group) {
    const GroupGrowth& own = growth.groups[group];
    const LayerGroup& facts = shape_.groups[group];
    for (int64_t block = own.first_leaving; block < own.end_leaving; ++block) {
      const bool was_full = block < num_full;
      if (!was_full || !growth.has_moved) {
        KVX_RETURN_IF_ERROR(pool.release(facts.packed_class, own.packed_id(block)));
        continue;
      }
      if (leaves_first(group, block) && !passes_its_place_on(group, own, block)) continue;
      KVX_RETURN_IF_ERROR(pool.release(facts.full_precision_class, own.id(block)));
    }
    const int64_t end = own.first_block + std::ssize(own.ids);
    for (int64_t block = groups_[group].table.size(); block < end; ++block) {
      const int64_t leaving = block - facts.full_precision_window.recent_blocks;
      const bool has_its_place = facts.full_precision_window.is_on() && own.leaves(leaving) &&
                                 passes_its_place_on(group, own, leaving);
      if (!has_its_place) KVX_RETURN_IF_ERROR(pool.release(entering_class(group), own.id(block)));
    }
  }
  if (growth.has_moved) return {};
  for (const OpenBlockCopy& copy : growth.copies) {
    KVX_RETURN_IF_ERROR(pool.release(copy.block_class, copy.to_id));
  }
  return {};
}

Status Sequence::append(BlockPool& pool, int64_t num_tokens) {
  KVX_RETURN_IF_ERROR(acquire(pool, num_tokens, growth_));
  KVX_RETURN_IF_ERROR(commit_moves(pool, growth_));
  return commit(pool, growth_);
}

// ---- the moments of a growth

int64_t Sequence::first_recent_block_at(int group, const SequenceGrowth& growth,
                                        int64_t end_block) const {
  const FullPrecisionWindow& window = shape_.groups[group].full_precision_window;
  if (!window.is_on()) return end_block;
  return std::max(growth.groups[group].first_leaving, end_block - window.recent_blocks);
}

void Sequence::blocks_at(int group, const SequenceGrowth& growth, int64_t end_block,
                         std::span<int32_t> row) const {
  const GroupGrowth& own = growth.groups[group];
  const int64_t first_recent = first_recent_block_at(group, growth, end_block);
  std::copy_n(groups_[group].table.data(), std::min(own.first_block, end_block), row.begin());
  for (int64_t block = own.first_block; block < end_block; ++block) {
    const bool has_left = own.leaves(block) && block < first_recent;
    row[static_cast<size_t>(block)] = has_left ? own.packed_id(block) : own.id(block);
  }
}

std::optional<int64_t> Sequence::block_leaving_at(int group, const SequenceGrowth& growth,
                                                  int64_t end_block) const {
  const FullPrecisionWindow& window = shape_.groups[group].full_precision_window;
  const int64_t block = end_block - 1 - window.recent_blocks;
  const bool was_full = block < num_tokens_ / block_size();
  if (!window.is_on() || was_full || !growth.groups[group].leaves(block)) return std::nullopt;
  return block;
}

bool Sequence::loses_open_block(int group, const SequenceGrowth& growth) const {
  return num_tokens_ % block_size() != 0 && growth.groups[group].leaves(num_tokens_ / block_size());
}

Status Sequence::check_cut(const SequenceGrowth& growth, int64_t num_tokens) const {
  for (int group = 0; group < num_groups(); ++group) {
    const int64_t first_recent =
        std::max(groups_[group].first_recent_block, growth.groups[group].end_leaving);
    KVX_RETURN_IF_ERROR(check_truncate(group, num_tokens, first_recent));
  }
  return {};
}

}  // namespace kvx::cache
