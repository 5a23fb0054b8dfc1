// EvictionOrder: between the policy, the retained blocks and those that wait.
#include "cache/prefix/eviction_order.hpp"

#include <chrono>

namespace kvx::cache {

EvictionOrder::EvictionOrder(EvictionKind kind, int32_t num_blocks, int64_t (*clock)())
    : lists_(num_blocks, kPolicyLists + 1),
      policy_(make_eviction_policy(kind, lists_, num_blocks)),
      clock_(clock),
      num_blocks_(num_blocks),
      is_held_(static_cast<size_t>(num_blocks)),
      is_waiting_(static_cast<size_t>(num_blocks)) {}

int64_t EvictionOrder::steady_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

void EvictionOrder::remove(int32_t id) {
  if (is_waiting_[id]) {
    lists_.remove(id);
    is_waiting_[id] = false;
  } else if (is_retained(id)) {
    retained_->remove(id);
  } else {
    policy_->remove(id);
    --num_in_policy_;
  }
}

void EvictionOrder::touch(int32_t id) {
  if (is_waiting_[id]) stop_waiting(id);
  if (is_retained(id)) return retained_->touch(id);
  policy_->touch(id);
}

void EvictionOrder::forget(int32_t id) {
  is_held_[id] = false;
  if (is_retained(id)) retained_->reset(id);
  policy_->forget(id);
}

// It is not inserted any more.
int32_t EvictionOrder::take_next() {
  const bool has_retained = retained_ && retained_->num_evictable() > 0;
  if (num_in_policy_ > 0 && !(has_retained && retained_->has_below_default())) {
    --num_in_policy_;
    return policy_->evict();
  }
  return has_retained ? retained_->take_lowest() : -1;
}

int32_t EvictionOrder::evict() {
  expire();
  for (int32_t id = take_next(); id >= 0; id = take_next()) {
    if (!is_held_[id]) return id;
    lists_.push_back(kWaiting, id);  // at most once a hold: amortised O(1)
    is_waiting_[id] = true;
  }
  const int32_t id = lists_.front(kWaiting);
  lists_.remove(id);
  is_waiting_[id] = false;
  return id;
}

// Back to those of its worth, before the others.
void EvictionOrder::stop_waiting(int32_t id) {
  lists_.remove(id);
  is_waiting_[id] = false;
  if (is_retained(id)) return retained_->insert(id, retained_->key(id), true);
  policy_->put_first(id);
  ++num_in_policy_;
}

void EvictionOrder::set_retention(int32_t id, uint32_t key, const Retention& retention) {
  if (!retained_) {
    if (retention.is_default()) return;
    retained_ = std::make_unique<RetainedBlocks>(num_blocks_);
  }
  const bool was_inserted =
      is_waiting_[id] || (is_retained(id) ? retained_->is_inserted(id) : lists_.contains(id));
  if (was_inserted) remove(id);
  if (retention.is_default()) {
    retained_->reset(id);
  } else {
    retained_->set(id, retention);
  }
  if (was_inserted) insert(id, key);
}

void EvictionOrder::expire() {
  if (!retained_ || !retained_->has_deadlines()) return;
  retained_->advance(clock_(), [this](int32_t id) {
    // A waiting block's key is the retained one's, too: it was inserted there.
    set_retention(id, retained_->key(id), {});
  });
}

}  // namespace kvx::cache
