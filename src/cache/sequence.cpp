// Sequence: takes and returns blocks, all groups or none.
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
  if (group.full_precision_window.head_blocks < 0 ||
      group.full_precision_window.recent_blocks < 0) {
    return invalid_argument(
        "full-precision window of layer group {} are {} and {} blocks; expected 0 or more", index,
        group.full_precision_window.head_blocks, group.full_precision_window.recent_blocks);
  }
  const bool has_packed_sinks = group.full_precision_window.is_on() &&
                                group.sink_blocks > group.full_precision_window.head_blocks;
  if (group.sink_blocks < 0 || has_packed_sinks || (group.sink_blocks > 0 && group.window == 0)) {
    return invalid_argument(
        "sink_blocks of layer group {} is {} with a window of {} and {} head blocks; expected 0 "
        "without a window, at most head_blocks with full-precision window",
        index, group.sink_blocks, group.window, group.full_precision_window.head_blocks);
  }
  if (group.full_precision_window.head_blocks > 0 && !group.full_precision_window.is_on()) {
    return invalid_argument(
        "recent_blocks of layer group {} is 0 with head_blocks {}; expected 1 "
        "or more: the open block is full_precision",
        index, group.full_precision_window.head_blocks);
  }
  return {};
}

// A class holds blocks of one kind. acquire_moves() relies on it: what it takes from one class
// never waits for what it frees in the same.
Status check_classes(std::span<const LayerGroup> groups) {
  for (const LayerGroup& full_precision : groups) {
    if (!full_precision.full_precision_window.is_on()) continue;
    for (const LayerGroup& packed : groups) {
      if (full_precision.full_precision_class == packed.packed_class) {
        return invalid_argument(
            "class {} holds full_precision and packed blocks; expected two classes",
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
    : shape_(shape), needed_(count_classes(shape.groups)) {
  for (int group = 0; group < static_cast<int>(shape.groups.size()); ++group) {
    groups_.push_back(empty_state(group));
  }
}

Sequence::GroupState Sequence::empty_state(int group) const {
  const int64_t max_blocks = blocks_for(shape_.max_tokens, shape_.block_size);
  return {BlockTable(max_blocks), shape_.groups[group].full_precision_window.head_blocks, 0};
}

int64_t Sequence::first_recent_block(int group) const {
  const GroupState& state = groups_[group];
  return shape_.groups[group].full_precision_window.is_on() ? state.first_recent_block
                                                            : state.table.size();
}

int64_t Sequence::most_tokens_at_once() const {
  const int64_t room = max_tokens() - num_tokens_;
  const bool any_full_precision =
      std::any_of(shape_.groups.begin(), shape_.groups.end(),
                  [](const LayerGroup& group) { return group.full_precision_window.is_on(); });
  return any_full_precision ? std::min(room, tokens_left_in_block()) : room;
}

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
  if (num_tokens > most_tokens_at_once()) {
    return invalid_argument(
        "num_tokens is {}; expected at most {}, the rest of the open block: with full-precision "
        "window a block "
        "is written before it is packed",
        num_tokens, most_tokens_at_once());
  }
  return {};
}

int Sequence::class_of(int group, int64_t block) const {
  const LayerGroup& facts = shape_.groups[group];
  const bool is_full_precision =
      facts.full_precision_window.is_on() && (block < facts.full_precision_window.head_blocks ||
                                              block >= groups_[group].first_recent_block);
  return is_full_precision ? facts.full_precision_class : facts.packed_class;
}

bool Sequence::is_released(int group, int64_t block) const {
  return block < groups_[group].first_block && block >= shape_.groups[group].sink_blocks;
}

bool Sequence::leaves_window(int group, int64_t num_tokens) const {
  const FullPrecisionWindow& ends = shape_.groups[group].full_precision_window;
  if (!ends.is_on()) return false;
  const int64_t tail = first_recent_block_of(ends, num_tokens_ + num_tokens, block_size());
  return tail > groups_[group].first_recent_block;
}

int64_t Sequence::num_new_blocks(int group, int64_t num_tokens) const {
  const int64_t end = blocks_for(num_tokens_ + num_tokens, block_size());
  return std::max<int64_t>(end - groups_[group].table.size(), 0);
}

void Sequence::add_needed_blocks(const BlockPool& pool, int64_t num_tokens,
                                 std::span<int64_t> needed) const {
  for (int group = 0; group < num_groups(); ++group) {
    const GroupState& state = groups_[group];
    if (must_copy_open_block(pool, group)) {
      ++needed[class_of(group, num_tokens_ / block_size())];
    }
    // A new block is the sequence's last: full-precision, if any is.
    needed[class_of(group, state.table.size())] += num_new_blocks(group, num_tokens);
    if (!leaves_window(group, num_tokens)) continue;
    const LayerGroup& facts = shape_.groups[group];
    ++needed[facts.packed_class];
    if (pool.use_count(facts.full_precision_class, state.table[state.first_recent_block]) ==
        1) {  // freed or cached
      --needed[facts.full_precision_class];
    }
  }
}

Status Sequence::check_free_blocks(const BlockPool& pool, int64_t num_tokens) {
  std::fill(needed_.begin(), needed_.end(), 0);
  add_needed_blocks(pool, num_tokens, needed_);
  return check_needed(pool);
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

Status Sequence::acquire_moves(BlockPool& pool, int64_t num_tokens, std::vector<BlockMove>& moves) {
  KVX_RETURN_IF_ERROR(check_append(pool, num_tokens));
  KVX_RETURN_IF_ERROR(check_free_blocks(pool, num_tokens));

  for (int group = 0; group < num_groups(); ++group) {
    if (!leaves_window(group, num_tokens)) continue;
    const GroupState& state = groups_[group];
    BlockMove move{group, state.first_recent_block, state.table[state.first_recent_block],
                   kNoBlock};
    KVX_RETURN_IF_ERROR(
        pool.allocate(shape_.groups[group].packed_class, std::span(&move.packed_id, 1)));
    moves.push_back(move);
  }
  return {};
}

Status Sequence::finish_moves(BlockPool& pool, std::span<const BlockMove> moves) {
  for (const BlockMove& move : moves) {
    GroupState& state = groups_[move.group];
    const int32_t full_precision_id = state.table.replace(move.block, move.packed_id);
    state.first_recent_block = move.block + 1;
    KVX_RETURN_IF_ERROR(
        pool.release(shape_.groups[move.group].full_precision_class, full_precision_id));
  }
  return {};
}

Status Sequence::reserve(BlockPool& pool, int64_t num_tokens) {
  KVX_RETURN_IF_ERROR(check_append(pool, num_tokens));
  for (int group = 0; group < num_groups(); ++group) {
    if (leaves_window(group, num_tokens)) {
      return invalid_argument(
          "block {} of layer group {} leaves the full-precision window; expected acquire_moves() "
          "before "
          "reserve()",
          groups_[group].first_recent_block, group);
    }
  }
  KVX_RETURN_IF_ERROR(check_free_blocks(pool, num_tokens));

  for (int group = 0; group < num_groups(); ++group) {
    BlockTable& table = groups_[group].table;
    for (int64_t left = num_new_blocks(group, num_tokens); left > 0; --left) {
      int32_t id = kNoBlock;
      KVX_RETURN_IF_ERROR(pool.allocate(class_of(group, table.size()), std::span(&id, 1)));
      table.push(id);
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

void Sequence::advance(int64_t num_tokens) {
  assert(blocks_for(num_tokens_ + num_tokens, block_size()) <= groups_[0].table.size());
  num_tokens_ += num_tokens;
}

Status Sequence::release_expired(BlockPool& pool) {
  for (int group = 0; group < num_groups(); ++group) {
    GroupState& state = groups_[group];
    const int64_t expired = expired_blocks(num_tokens_, shape_.groups[group].window, block_size());
    for (; state.first_block < expired; ++state.first_block) {
      if (state.first_block < shape_.groups[group].sink_blocks) continue;
      const int block_class = class_of(group, state.first_block);
      const int32_t id = state.table.replace(state.first_block, kNoBlock);
      KVX_RETURN_IF_ERROR(pool.release(block_class, id));
    }
    // A block that is gone does not leave the window a second time.
    state.first_recent_block = std::max(state.first_recent_block, state.first_block);
  }
  return {};
}

Status Sequence::check_truncate(int group, int64_t num_tokens) const {
  const LayerGroup& facts = shape_.groups[group];
  const GroupState& state = groups_[group];
  const int64_t first_read = std::max<int64_t>(num_tokens - facts.window + 1, 0);
  const int64_t open_block_start = num_tokens / block_size() * block_size();
  const int64_t first_kept = state.first_block * block_size();
  const int64_t sinks_end = facts.sink_blocks * block_size();
  const int64_t first_needed = std::max(std::min(first_read, open_block_start), sinks_end);
  if (first_needed < std::min(num_tokens, first_kept)) {
    return out_of_range(
        "num_tokens is {}; the window of layer group {} has left tokens {} to {} behind, and a "
        "sequence of that length reads or writes beside some",
        num_tokens, group, sinks_end, first_kept - 1);
  }
  const int64_t cut = num_tokens / block_size();
  const bool cuts_packed = facts.full_precision_window.is_on() && num_tokens % block_size() != 0 &&
                           cut >= facts.full_precision_window.head_blocks &&
                           cut < state.first_recent_block;
  if (cuts_packed) {
    return unsupported(
        "num_tokens is {}; it cuts block {} of layer group {}, which has left the full-precision "
        "window "
        "(expected a multiple of block_size {} or at least {})",
        num_tokens, cut, group, block_size(), state.first_recent_block * block_size());
  }
  return {};
}

Status Sequence::truncate(BlockPool& pool, int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > num_tokens_) {
    return out_of_range("num_tokens is {}; expected 0 to {}", num_tokens, num_tokens_);
  }
  for (int group = 0; group < num_groups(); ++group) {
    KVX_RETURN_IF_ERROR(check_truncate(group, num_tokens));
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

// Frees a group's blocks from num_blocks on.
Status Sequence::drop_blocks(BlockPool& pool, int group, int64_t num_blocks) {
  GroupState& state = groups_[group];
  while (state.table.size() > num_blocks) {
    const int block_class = class_of(group, state.table.size() - 1);
    const int32_t id = state.table.pop();
    if (id != kNoBlock) KVX_RETURN_IF_ERROR(pool.release(block_class, id));
  }
  state.first_block = std::min(state.first_block, num_blocks);
  state.first_recent_block = std::max(shape_.groups[group].full_precision_window.head_blocks,
                                      std::min(state.first_recent_block, num_blocks));
  return {};
}

}  // namespace kvx::cache
