// RetainedBlocks: the blocks of a class of which somebody said how long they should stay: a
// priority, a deadline, a pin. They lie in a list a priority, those released first in front, and no
// eviction policy sees them. Every call is O(1), amortised, and allocates nothing.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "cache/prefix/id_lists.hpp"

namespace kvx::cache {

// Priorities are TensorRT-LLM's: of two blocks that nobody uses the one with the lower goes first.
inline constexpr int kMostPriority = 100;
inline constexpr int kDefaultPriority = 35;  // of blocks of which nobody said anything
inline constexpr int kSharedPriority = 70;   // that EvictionKind::kAgents gives by itself
inline constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

struct Retention {
  int priority = kDefaultPriority;
  bool is_pinned = false;       // never evicted; the priority is not looked at
  int64_t until_ms = kForever;  // on the pool's clock: the default again from then on

  bool is_default() const { return priority == kDefaultPriority && !is_pinned; }
};

class RetainedBlocks {
 public:
  explicit RetainedBlocks(int32_t num_blocks)
      : lists_(num_blocks, kNumLists),
        deadlines_(num_blocks, kNumSlots + 1),
        blocks_(static_cast<size_t>(num_blocks)) {}

  bool contains(int32_t id) const { return blocks_[id].list != kNone; }
  Retention retention(int32_t id) const;
  // Requires: !retention.is_default(), and the id is in no list.
  void set(int32_t id, const Retention& retention);
  // The id is as those of which nobody said anything. Requires: it is in no list.
  void reset(int32_t id);
  // Of all blocks that are contained, whether they are in use or not.
  int32_t num_pinned() const { return num_pinned_; }

  // The block has no user; key as EvictionPolicy::insert's, for its return to the policy. Requires:
  // contained.
  void insert(int32_t id, uint32_t key, bool is_first = false);
  void remove(int32_t id);
  bool is_inserted(int32_t id) const { return lists_.contains(id); }
  void touch(int32_t id);
  uint32_t key(int32_t id) const { return blocks_[id].key; }

  // Inserted blocks that may be evicted: all but pinned ones.
  int32_t num_evictable() const { return num_inserted_ - num_pinned_inserted_; }
  int32_t num_pinned_inserted() const { return num_pinned_inserted_; }
  // Requires: num_evictable() > 0.
  bool has_below_default() const { return lowest() < kDefaultPriority; }
  int32_t take_lowest();

  // Calls expire(id) for every block whose deadline has come; it may call set() and reset().
  bool has_deadlines() const { return num_deadlines_ > 0; }
  void advance(int64_t now_ms, const std::function<void(int32_t)>& expire);

 private:
  static constexpr int kPinned = kMostPriority + 1;
  static constexpr int kNumLists = kPinned + 1;
  static constexpr uint8_t kNone = 255;
  // A wheel of deadlines: a slot has those of a tick, and of whole turns later.
  static constexpr int64_t kTickMs = 100;
  static constexpr int kNumSlots = 1024;

  struct Block {
    int64_t until_ms = kForever;
    uint32_t key = 0;
    uint8_t list = kNone;
  };

  int lowest() const;
  static int slot_of(int64_t ms) { return static_cast<int>(ms / kTickMs % kNumSlots); }

  IdLists lists_;
  IdLists deadlines_;  // the last list is for those that advance() puts back
  std::vector<Block> blocks_;
  std::array<uint64_t, 2> mask_{};  // of lists that are not empty, pinned ones apart
  int32_t num_inserted_ = 0;
  int32_t num_pinned_ = 0;
  int32_t num_pinned_inserted_ = 0;
  int32_t num_deadlines_ = 0;
  int64_t last_tick_ = 0;
};

}  // namespace kvx::cache
