// RetainedBlocks: lists by priority with a mask of those that have blocks, and a wheel of
// deadlines.
#include "cache/prefix/retained_blocks.hpp"

#include <algorithm>
#include <bit>

namespace kvx::cache {

Retention RetainedBlocks::retention(int32_t id) const {
  const Block& block = blocks_[id];
  if (block.list == kNone) return {};
  if (block.list == kPinned) return {kMostPriority, true, block.until_ms};
  return {block.list, false, block.until_ms};
}

void RetainedBlocks::set(int32_t id, const Retention& retention) {
  reset(id);
  Block& block = blocks_[id];
  block.list = static_cast<uint8_t>(retention.is_pinned ? kPinned : retention.priority);
  block.until_ms = retention.until_ms;
  if (retention.is_pinned) ++num_pinned_;
  if (retention.until_ms == kForever) return;
  deadlines_.push_back(slot_of(retention.until_ms), id);
  ++num_deadlines_;
}

void RetainedBlocks::reset(int32_t id) {
  Block& block = blocks_[id];
  if (block.list == kPinned) --num_pinned_;
  if (deadlines_.contains(id)) {
    deadlines_.remove(id);
    --num_deadlines_;
  }
  block = {};
}

void RetainedBlocks::insert(int32_t id, uint32_t key, bool is_first) {
  Block& block = blocks_[id];
  block.key = key;
  ++num_inserted_;
  if (is_first) {
    lists_.push_front(block.list, id);
  } else {
    lists_.push_back(block.list, id);
  }
  if (block.list == kPinned) {
    ++num_pinned_inserted_;
  } else {
    mask_[block.list / 64] |= uint64_t{1} << block.list % 64;
  }
}

void RetainedBlocks::remove(int32_t id) {
  const uint8_t list = blocks_[id].list;
  lists_.remove(id);
  --num_inserted_;
  if (list == kPinned) {
    --num_pinned_inserted_;
  } else if (lists_.is_empty(list)) {
    mask_[list / 64] &= ~(uint64_t{1} << list % 64);
  }
}

void RetainedBlocks::touch(int32_t id) {
  if (!is_inserted(id)) return;
  lists_.remove(id);
  lists_.push_back(blocks_[id].list, id);
}

int RetainedBlocks::lowest() const {
  if (mask_[0] != 0) return std::countr_zero(mask_[0]);
  return 64 + std::countr_zero(mask_[1]);  // 128 when there is none
}

int32_t RetainedBlocks::take_lowest() {
  const int32_t id = lists_.front(lowest());
  remove(id);
  return id;
}

void RetainedBlocks::advance(int64_t now_ms, const std::function<void(int32_t)>& expire) {
  const int64_t tick = now_ms / kTickMs;
  const int64_t first = std::max(last_tick_, tick - kNumSlots + 1);
  for (int64_t t = first; t <= tick && num_deadlines_ > 0; ++t) {
    const int slot = static_cast<int>(t % kNumSlots);
    while (!deadlines_.is_empty(slot)) {
      const int32_t id = deadlines_.front(slot);
      deadlines_.remove(id);
      if (blocks_[id].until_ms > now_ms) {
        deadlines_.push_back(kNumSlots, id);
        continue;
      }
      --num_deadlines_;
      expire(id);
    }
    while (!deadlines_.is_empty(kNumSlots)) {
      const int32_t id = deadlines_.front(kNumSlots);
      deadlines_.remove(id);
      deadlines_.push_back(slot, id);
    }
  }
  last_tick_ = tick;  // its slot may still have some that are due within the tick
}

}  // namespace kvx::cache
