// EventPublisher: checks its options, and turns the indexes' events into the component's.
#include "observe/event_publisher.hpp"

#include "observe/open_component.hpp"

namespace kvx::observe {
namespace {

Status check_range(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return {};
  return invalid_argument("{} is {}; expected 1 to {}", name, value, most);
}

Status check_options(const EventPublisherOptions& options) {
  KVX_RETURN_IF_ERROR(check_range("buffer_batches", options.buffer_batches, 1'000'000));
  KVX_RETURN_IF_ERROR(check_range("high_water_mark", options.high_water_mark, 10'000'000));
  KVX_RETURN_IF_ERROR(check_range("queue_events", options.queue_events, 10'000'000));
  if (options.data_parallel_rank < 0) {
    return invalid_argument("data_parallel_rank is {}; expected 0 or more",
                            options.data_parallel_rank);
  }
  if (options.endpoint.empty()) {
    return invalid_argument("endpoint is ''; expected one of ZeroMQ's, as tcp://127.0.0.1:5557");
  }
  return {};
}

// vLLM's words. The pool that attention reads is "GPU" there on a CPU too, so that it differs from
// the tiers behind it.
const char* medium_of(cache::Tier tier) {
  switch (tier) {
    case cache::Tier::kFirst:
      return "GPU";
    case cache::Tier::kHost:
      return "CPU";
    case cache::Tier::kDisk:
    case cache::Tier::kStore:
      break;
  }
  return "STORAGE";
}

}  // namespace

Result<std::unique_ptr<EventPublisher>> EventPublisher::create(
    kv::KvCache& cache, const EventPublisherOptions& options) {
  KVX_RETURN_IF_ERROR(check_options(options));
  KVX_ASSIGN_OR_RETURN(const kvx_observe_functions_t* functions, open_component());
  const kvx_observe_publisher_options given{options.endpoint.c_str(),
                                            options.replay_endpoint.c_str(),
                                            options.topic.c_str(),
                                            cache.config().block_size,
                                            static_cast<int32_t>(options.buffer_batches),
                                            static_cast<int32_t>(options.high_water_mark),
                                            static_cast<int32_t>(options.queue_events),
                                            options.data_parallel_rank,
                                            options.hashes_are_integers ? 1 : 0};
  kvx_observe_error error{};
  kvx_observe_publisher* const made = functions->publisher_create(&given, &error);
  if (made == nullptr) return invalid_argument("{}", error.text);
  std::unique_ptr<EventPublisher> publisher(new EventPublisher(cache, functions, made));
  EventPublisher* const to = publisher.get();
  KVX_RETURN_IF_ERROR(cache.set_event_publisher(
      [=](const cache::PrefixEvent& event) { to->send(event, functions->publisher_push); },
      [=](const cache::PrefixEvent& event) { to->send(event, functions->publisher_push_all); }));
  return publisher;
}

EventPublisher::~EventPublisher() {
  (void)cache_->set_event_publisher({}, {});  // after it nobody calls send()
  functions_->publisher_free(publisher_);
}

void EventPublisher::send(const cache::PrefixEvent& event, Push push) const {
  kvx_observe_event sent{};
  sent.kind = KVX_OBSERVE_ALL_CLEARED;
  if (event.kind != cache::PrefixEvent::Kind::kAllCleared) {
    const bool is_stored = event.kind == cache::PrefixEvent::Kind::kStored;
    sent.kind = is_stored ? KVX_OBSERVE_STORED : KVX_OBSERVE_REMOVED;
    sent.medium = medium_of(event.tier);
    sent.hash = event.hash.bytes.data();
    sent.parent = event.is_first ? nullptr : event.parent.bytes.data();
    sent.tokens = event.tokens.data();
    sent.adapter = event.keys->adapter.c_str();
    sent.image = event.keys->image.c_str();
    sent.tenant = event.keys->tenant.c_str();
  }
  push(publisher_, &sent);
}

kvx_observe_publisher_counts EventPublisher::counts() const {
  kvx_observe_publisher_counts counts{};
  functions_->publisher_counts(publisher_, &counts);
  return counts;
}

}  // namespace kvx::observe
