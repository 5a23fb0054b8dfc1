// EventRing: events on their way from the cache's thread to the sending one. One thread pushes, one
// pops; neither ever waits for the other.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "observe/component.h"

namespace kvx::observe {

using Hash = std::array<uint8_t, 16>;

struct Event {
  int32_t kind = 0;
  std::string medium;
  Hash hash{};
  Hash parent{};
  bool has_parent = false;
  std::string adapter, image, tenant;
};

class EventRing {
 public:
  EventRing(int64_t num_events, int64_t block_size)
      : events_(static_cast<size_t>(num_events)),
        tokens_(static_cast<size_t>(num_events * block_size)),
        block_size_(static_cast<size_t>(block_size)) {}

  // False: it is full.
  bool push(const kvx_observe_event& event);

  // What has been pushed and not popped, at most `most`, in order: event(0) is the oldest.
  int64_t num_waiting(int64_t most) const;
  const Event& event(int64_t i) const { return events_[place(popped_ + i)]; }
  std::span<const int32_t> tokens(int64_t i) const {
    return {tokens_.data() + place(popped_ + i) * block_size_, block_size_};
  }
  void pop(int64_t count) { popped_.fetch_add(count, std::memory_order_release); }

 private:
  size_t place(int64_t number) const { return static_cast<size_t>(number) % events_.size(); }

  std::vector<Event> events_;
  std::vector<int32_t> tokens_;  // [events, block_size]
  size_t block_size_;
  std::atomic<int64_t> pushed_ = 0;
  std::atomic<int64_t> popped_ = 0;
};

}  // namespace kvx::observe
