// EvictionOrder: a policy for chains of blocks. Without its parent's content a block's own is never
// found, so a block that others stand on is held: when the policy would evict it, it waits instead,
// and goes first once nothing stands on it any more. Chains go from their ends, whatever the policy
// thinks of their beginnings; a block is worth as much as the best that stands on it.
//
// Blocks with a retention of their own (retained_blocks.hpp) are not the policy's: those of a lower
// priority than the default go before all of the policy's, those of a higher one after them, pinned
// ones never.
#pragma once

#include <memory>
#include <vector>

#include "cache/prefix/eviction_policy.hpp"
#include "cache/prefix/retained_blocks.hpp"

namespace kvx::cache {

// Calls as EvictionPolicy's, with the same requirements.
class EvictionOrder {
 public:
  // clock: milliseconds that never go back, of deadlines.
  EvictionOrder(EvictionKind kind, int32_t num_blocks, int64_t (*clock)() = steady_ms);
  EvictionOrder(const EvictionOrder&) = delete;
  EvictionOrder& operator=(const EvictionOrder&) = delete;

  void insert(int32_t id, uint32_t key) {
    if (is_retained(id)) return retained_->insert(id, key);
    policy_->insert(id, key);
    ++num_in_policy_;
  }
  void remove(int32_t id);
  void touch(int32_t id);
  void forget(int32_t id);
  // A held block goes only when all are held: the one that has waited longest. Requires: an
  // inserted block is not pinned.
  int32_t evict();

  // Other blocks stand on this one; it may be cached or in use.
  void hold(int32_t id) { is_held_[id] = true; }
  void unhold(int32_t id) {
    is_held_[id] = false;
    if (is_waiting_[id]) stop_waiting(id);
  }

  // The block may be cached (then key is the one that it was inserted with) or in use.
  void set_retention(int32_t id, uint32_t key, const Retention& retention);
  Retention retention(int32_t id) const {
    return retained_ ? retained_->retention(id) : Retention{};
  }
  int32_t num_pinned() const { return retained_ ? retained_->num_pinned() : 0; }
  // Inserted blocks that are never evicted.
  int32_t num_pinned_inserted() const { return retained_ ? retained_->num_pinned_inserted() : 0; }
  // Deadlines that have come are over.
  void expire();

  static int64_t steady_ms();

 private:
  static constexpr int kWaiting = kPolicyLists;

  bool is_retained(int32_t id) const { return retained_ && retained_->contains(id); }
  void stop_waiting(int32_t id);
  int32_t take_next();

  IdLists lists_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::unique_ptr<RetainedBlocks> retained_;  // null until somebody sets a retention
  int64_t (*clock_)();
  int32_t num_blocks_;
  int32_t num_in_policy_ = 0;
  std::vector<bool> is_held_;
  std::vector<bool> is_waiting_;
};

}  // namespace kvx::cache
