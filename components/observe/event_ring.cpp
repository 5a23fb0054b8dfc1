// EventRing: the slots are written and read in place.
#include "components/observe/event_ring.hpp"

#include <algorithm>

namespace kvx::observe {

bool EventRing::push(const kvx_observe_event& event) {
  const int64_t number = pushed_.load(std::memory_order_relaxed);
  const auto capacity = static_cast<int64_t>(events_.size());
  if (number - popped_.load(std::memory_order_acquire) >= capacity) return false;
  Event& slot = events_[place(number)];
  slot.kind = event.kind;
  if (event.kind != KVX_OBSERVE_ALL_CLEARED) {
    slot.medium = event.medium;
    std::copy_n(event.hash, slot.hash.size(), slot.hash.begin());
    slot.has_parent = event.parent != nullptr;
    if (slot.has_parent) std::copy_n(event.parent, slot.parent.size(), slot.parent.begin());
    slot.adapter = event.adapter;
    slot.image = event.image;
    slot.tenant = event.tenant;
  }
  if (event.kind == KVX_OBSERVE_STORED) {
    std::copy_n(event.tokens, block_size_, tokens_.begin() + place(number) * block_size_);
  }
  pushed_.store(number + 1, std::memory_order_release);
  return true;
}

int64_t EventRing::num_waiting(int64_t most) const {
  const int64_t waiting = pushed_.load(std::memory_order_acquire) - popped_.load();
  return std::min(waiting, most);
}

}  // namespace kvx::observe
