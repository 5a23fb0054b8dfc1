// EvictionOrder: a policy for chains of blocks. Without its parent's content a block's own is never
// found, so a block that others stand on is held: when the policy would evict it, it waits instead,
// and goes first once nothing stands on it any more. Chains go from their ends, whatever the policy
// thinks of their beginnings; a block is worth as much as the best that stands on it.
#pragma once

#include <vector>

#include "cache/prefix/eviction_policy.hpp"

namespace kvx::cache {

// Calls as EvictionPolicy's, with the same requirements.
class EvictionOrder {
 public:
  EvictionOrder(EvictionKind kind, int32_t num_blocks)
      : lists_(num_blocks, kPolicyLists + 1),
        policy_(make_eviction_policy(kind, lists_, num_blocks)),
        is_held_(static_cast<size_t>(num_blocks)),
        is_waiting_(static_cast<size_t>(num_blocks)) {}
  EvictionOrder(const EvictionOrder&) = delete;
  EvictionOrder& operator=(const EvictionOrder&) = delete;

  void insert(int32_t id, uint32_t key) {
    policy_->insert(id, key);
    ++num_in_policy_;
  }
  void remove(int32_t id) {
    if (is_waiting_[id]) return stop_waiting(id);
    policy_->remove(id);
    --num_in_policy_;
  }
  void touch(int32_t id) {
    if (is_waiting_[id]) return_to_policy(id);
    policy_->touch(id);
  }
  void forget(int32_t id) {
    is_held_[id] = false;
    policy_->forget(id);
  }
  // A held block goes only when all are held: the one that has waited longest.
  int32_t evict() {
    while (num_in_policy_ > 0) {
      const int32_t id = policy_->evict();
      --num_in_policy_;
      if (!is_held_[id]) return id;
      lists_.push_back(kWaiting, id);  // at most once a hold: amortised O(1)
      is_waiting_[id] = true;
    }
    const int32_t id = lists_.front(kWaiting);
    stop_waiting(id);
    return id;
  }

  // Other blocks stand on this one; it may be cached or in use.
  void hold(int32_t id) { is_held_[id] = true; }
  void unhold(int32_t id) {
    is_held_[id] = false;
    if (is_waiting_[id]) return_to_policy(id);
  }

 private:
  static constexpr int kWaiting = kPolicyLists;

  void stop_waiting(int32_t id) {
    lists_.remove(id);
    is_waiting_[id] = false;
  }
  void return_to_policy(int32_t id) {
    stop_waiting(id);
    policy_->put_first(id);
    ++num_in_policy_;
  }

  IdLists lists_;
  std::unique_ptr<EvictionPolicy> policy_;
  int32_t num_in_policy_ = 0;
  std::vector<bool> is_held_;
  std::vector<bool> is_waiting_;
};

}  // namespace kvx::cache
