// Sequence: checks of its shape, tables, cuts. Its growth is in sequence_growth.cpp.
#include "cache/sequence.hpp"

#include <algorithm>
#include <cassert>

namespace kvx::cache {
namespace {

Status check_group(const LayerGroup& group, size_t index) {
  if (group.window < 0) {
    return invalid_argument("window of layer group {} is {}; expected 0 or more", index,
                            group.window);
  }
  if (group.packed_class < 0 || group.full_precision_class < 0) {
    return invalid_argument("layer group {} takes blocks of classes {} and {}; expected 0 or more",
                            index, group.packed_class, group.full_precision_class);
  }
  const FullPrecisionWindow& window = group.full_precision_window;
  if (window.sink_blocks < 0 || window.recent_blocks < 0) {
    return invalid_argument(
        "the full-precision window of layer group {} has {} sink and {} recent blocks; expected 0 "
        "or more",
        index, window.sink_blocks, window.recent_blocks);
  }
  const bool has_packed_sinks = window.is_on() && group.window_sink_blocks > window.sink_blocks;
  if (group.window_sink_blocks < 0 || has_packed_sinks ||
      (group.window_sink_blocks > 0 && group.window == 0)) {
    return invalid_argument(
        "window_sink_blocks of layer group {} is {} with a window of {} and {} sink blocks in full "
        "precision; expected 0 without a window, at most those with a full-precision window",
        index, group.window_sink_blocks, group.window, window.sink_blocks);
  }
  if (window.sink_blocks > 0 && !window.is_on()) {
    return invalid_argument(
        "recent_blocks of layer group {} is 0 with sink_blocks {}; expected 1 or more: the open "
        "block is in full precision",
        index, window.sink_blocks);
  }
  return {};
}

// A class holds blocks of one kind: an id in a table's packed part is never one of a full-precision
// block.
Status check_classes(std::span<const LayerGroup> groups) {
  for (const LayerGroup& full_precision : groups) {
    if (!full_precision.full_precision_window.is_on()) continue;
    for (const LayerGroup& packed : groups) {
      if (full_precision.full_precision_class == packed.packed_class) {
        return invalid_argument(
            "class {} holds full-precision and packed blocks; expected two classes",
            full_precision.full_precision_class);
      }
    }
  }
  return {};
}

size_t count_classes(std::span<const LayerGroup> groups) {
  int last = 0;
  for (const LayerGroup& group : groups) {
    last = std::max({last, group.packed_class, group.full_precision_class});
  }
  return static_cast<size_t>(last) + 1;
}

}  // namespace

Result<Sequence> Sequence::create(const SequenceShape& shape) {
  if (shape.block_size < 1) {
    return invalid_argument("block_size is {}; expected 1 or more", shape.block_size);
  }
  if (shape.max_tokens < 1) {
    return invalid_argument("max_tokens is {}; expected 1 or more", shape.max_tokens);
  }
  if (shape.groups.empty()) return invalid_argument("num_groups is 0; expected 1 or more");
  for (size_t i = 0; i < shape.groups.size(); ++i) {
    KVX_RETURN_IF_ERROR(check_group(shape.groups[i], i));
  }
  KVX_RETURN_IF_ERROR(check_classes(shape.groups));
  return Sequence(shape);
}

Sequence::Sequence(const SequenceShape& shape)
    : shape_(shape), needed_(count_classes(shape.groups)), spare_(needed_.size()) {
  for (int group = 0; group < static_cast<int>(shape.groups.size()); ++group) {
    groups_.push_back(empty_state(group));
  }
}

Sequence::GroupState Sequence::empty_state(int group) const {
  const int64_t max_blocks = blocks_for(shape_.max_tokens, shape_.block_size);
  return {BlockTable(max_blocks), shape_.groups[group].full_precision_window.sink_blocks, 0};
}

int64_t Sequence::first_recent_block(int group) const {
  const GroupState& state = groups_[group];
  return shape_.groups[group].full_precision_window.is_on() ? state.first_recent_block
                                                            : state.table.size();
}

int Sequence::class_of(int group, int64_t block) const {
  const LayerGroup& facts = shape_.groups[group];
  const bool is_full_precision =
      facts.full_precision_window.is_on() && (block < facts.full_precision_window.sink_blocks ||
                                              block >= groups_[group].first_recent_block);
  return is_full_precision ? facts.full_precision_class : facts.packed_class;
}

bool Sequence::is_released(int group, int64_t block) const {
  return block < groups_[group].first_block && block >= shape_.groups[group].window_sink_blocks;
}

Status Sequence::check_needed(const BlockPool& pool) const {
  for (int i = 0; i < static_cast<int>(needed_.size()); ++i) {
    if (needed_[i] > pool.num_available(i)) {
      return out_of_range("class '{}' has {} free blocks of {}; {} are wanted", pool.name(i),
                          pool.num_available(i), pool.num_blocks(i), needed_[i]);
    }
  }
  return {};
}

void Sequence::slots(int group, int64_t first_token, std::span<int64_t> slots) const {
  const BlockTable& table = groups_[group].table;
  int64_t token = first_token;
  for (int64_t& slot : slots) {
    slot = table[token / block_size()] * block_size() + token % block_size();
    ++token;
  }
}

Status Sequence::release_expired(BlockPool& pool) {
  for (int group = 0; group < num_groups(); ++group) {
    GroupState& state = groups_[group];
    const int64_t expired = expired_blocks(num_tokens_, shape_.groups[group].window, block_size());
    for (; state.first_block < expired; ++state.first_block) {
      if (state.first_block < shape_.groups[group].window_sink_blocks) continue;
      const int block_class = class_of(group, state.first_block);
      const int32_t id = state.table.replace(state.first_block, kNoBlock);
      KVX_RETURN_IF_ERROR(pool.release(block_class, id));
    }
    // A block that is gone does not leave the window a second time.
    state.first_recent_block = std::max(state.first_recent_block, state.first_block);
  }
  return {};
}

Status Sequence::check_truncate(int group, int64_t num_tokens, int64_t first_recent_block) const {
  const LayerGroup& facts = shape_.groups[group];
  const GroupState& state = groups_[group];
  const int64_t first_read = std::max<int64_t>(num_tokens - facts.window + 1, 0);
  const int64_t open_block_start = num_tokens / block_size() * block_size();
  const int64_t first_kept = state.first_block * block_size();
  const int64_t sinks_end = facts.window_sink_blocks * block_size();
  const int64_t first_needed = std::max(std::min(first_read, open_block_start), sinks_end);
  if (first_needed < std::min(num_tokens, first_kept)) {
    return out_of_range(
        "num_tokens is {}; the window of layer group {} has left tokens {} to {} behind, and a "
        "sequence of that length reads or writes beside some",
        num_tokens, group, sinks_end, first_kept - 1);
  }
  const int64_t cut = num_tokens / block_size();
  const bool cuts_packed = facts.full_precision_window.is_on() && num_tokens % block_size() != 0 &&
                           cut >= facts.full_precision_window.sink_blocks &&
                           cut < first_recent_block;
  if (cuts_packed) {
    return unsupported(
        "num_tokens is {}; it cuts block {} of layer group {}, which has left the full-precision "
        "window (expected a multiple of block_size {} or at least {})",
        num_tokens, cut, group, block_size(), first_recent_block * block_size());
  }
  return {};
}

Status Sequence::truncate(BlockPool& pool, int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > num_tokens_) {
    return out_of_range("num_tokens is {}; expected 0 to {}", num_tokens, num_tokens_);
  }
  for (int group = 0; group < num_groups(); ++group) {
    KVX_RETURN_IF_ERROR(check_truncate(group, num_tokens, groups_[group].first_recent_block));
  }
  const int64_t num_blocks = blocks_for(num_tokens, block_size());
  for (int group = 0; group < num_groups(); ++group) {
    KVX_RETURN_IF_ERROR(drop_blocks(pool, group, num_blocks));
  }
  num_tokens_ = num_tokens;
  return {};
}

Status Sequence::clear(BlockPool& pool) {
  for (int group = 0; group < num_groups(); ++group) {
    KVX_RETURN_IF_ERROR(drop_blocks(pool, group, 0));
  }
  num_tokens_ = 0;
  return {};
}

// Releases a group's blocks from num_blocks on.
Status Sequence::drop_blocks(BlockPool& pool, int group, int64_t num_blocks) {
  GroupState& state = groups_[group];
  while (state.table.size() > num_blocks) {
    const int block_class = class_of(group, state.table.size() - 1);
    const int32_t id = state.table.pop();
    if (id != kNoBlock) KVX_RETURN_IF_ERROR(pool.release(block_class, id));
  }
  state.first_block = std::min(state.first_block, num_blocks);
  state.first_recent_block = std::max(shape_.groups[group].full_precision_window.sink_blocks,
                                      std::min(state.first_recent_block, num_blocks));
  return {};
}

}  // namespace kvx::cache
