// kvx_cache_publish_events and kvx_cache_event_publisher: events of a cache for other processes.
#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"

namespace kvx::boundary {
namespace {

Result<observe::EventPublisherOptions> read_publisher(const kvx_event_publisher_t* caller) {
  KVX_ASSIGN_OR_RETURN(const kvx_event_publisher_t args, read_struct(caller, "publisher"));
  if ((args.flags & ~uint32_t{KVX_EVENTS_INTEGER_HASHES}) != 0) {
    return invalid_argument("publisher.flags is {:#x}; expected KVX_EVENTS_* alone", args.flags);
  }
  if (args.data_parallel_rank > INT32_MAX) {
    return invalid_argument("publisher.data_parallel_rank is {}; expected 0 to {}",
                            args.data_parallel_rank, INT32_MAX);
  }
  observe::EventPublisherOptions options;
  if (args.endpoint != nullptr) options.endpoint = args.endpoint;
  if (args.replay_endpoint != nullptr) options.replay_endpoint = args.replay_endpoint;
  if (args.topic != nullptr) options.topic = args.topic;
  if (args.buffer_batches != 0) options.buffer_batches = args.buffer_batches;
  if (args.high_water_mark != 0) options.high_water_mark = args.high_water_mark;
  if (args.queue_events != 0) options.queue_events = args.queue_events;
  options.data_parallel_rank = static_cast<int>(args.data_parallel_rank);
  options.hashes_are_integers = (args.flags & KVX_EVENTS_INTEGER_HASHES) != 0;
  return options;
}

Status publish_events(kvx_cache_t handle, const kvx_event_publisher_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (caller == nullptr) {
    owned->publisher.reset();
    return {};
  }
  KVX_ASSIGN_OR_RETURN(const observe::EventPublisherOptions options, read_publisher(caller));
  owned->publisher.reset();  // it may have bound the same endpoint
  KVX_ASSIGN_OR_RETURN(owned->publisher, observe::EventPublisher::create(*owned->cache, options));
  return {};
}

Status event_publisher(kvx_cache_t handle, kvx_event_publisher_info_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (!owned->publisher) {
    return invalid_argument("no events are published; call kvx_cache_publish_events first");
  }
  const kvx_observe_publisher_counts counts = owned->publisher->counts();
  kvx_event_publisher_info_t answer{};
  answer.endpoint = owned->publisher->endpoint();
  answer.replay_endpoint = owned->publisher->replay_endpoint();
  answer.num_events = counts.num_events;
  answer.num_batches = counts.num_batches;
  answer.num_dropped = counts.num_dropped;
  answer.num_replays = counts.num_replays;
  return write_struct(answer, caller, "info");
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_cache_publish_events(kvx_cache_t cache,
                                                 const kvx_event_publisher_t* publisher) {
  return kvx::boundary::run_call([&] { return kvx::boundary::publish_events(cache, publisher); });
}

extern "C" kvx_status_t kvx_cache_event_publisher(kvx_cache_t cache,
                                                  kvx_event_publisher_info_t* info) {
  return kvx::boundary::run_call([&] { return kvx::boundary::event_publisher(cache, info); });
}
