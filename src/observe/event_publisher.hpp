// EventPublisher: tells other processes which blocks a cache has, in the schema of vLLM's KV events
// (docs/kv-events.md). libkvx_observe.so sends; this hands it what the cache's indexes say.
#pragma once

#include <memory>
#include <string>

#include "kv/kv_cache.hpp"
#include "observe/component.h"

namespace kvx::observe {

struct EventPublisherOptions {
  std::string endpoint = "tcp://127.0.0.1:5557";  // bound; "tcp://127.0.0.1:*" takes any free port
  std::string replay_endpoint = {};               // empty: no replay
  std::string topic = {};
  int64_t buffer_batches = 10000;    // kept for replay, 1 to 10^6
  int64_t high_water_mark = 100000;  // batches that ZeroMQ keeps for a slow listener, 1 to 10^7
  int64_t queue_events = 16384;      // between the cache and the sending thread, 1 to 10^7
  int data_parallel_rank = 0;
  bool hashes_are_integers = false;  // 64 bits, as VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
};

class EventPublisher {
 public:
  // Tells of every block that can be found now, then of those that come and go. The cache outlives
  // it and has no other. INVALID_ARGUMENT: an option out of range, or an endpoint that cannot be
  // bound; UNSUPPORTED: prefixes are off, or open_component's.
  static Result<std::unique_ptr<EventPublisher>> create(kv::KvCache& cache,
                                                        const EventPublisherOptions& options);
  ~EventPublisher();

  kvx_observe_publisher_counts counts() const;
  // Where the sockets are bound; live as long as this.
  const char* endpoint() const { return functions_->publisher_endpoint(publisher_); }
  const char* replay_endpoint() const { return functions_->publisher_replay_endpoint(publisher_); }

 private:
  EventPublisher(kv::KvCache& cache, const kvx_observe_functions_t* functions,
                 kvx_observe_publisher* publisher)
      : cache_(&cache), functions_(functions), publisher_(publisher) {}
  using Push = void (*)(kvx_observe_publisher*, const kvx_observe_event*);
  void send(const cache::PrefixEvent& event, Push push) const;

  kv::KvCache* cache_;
  const kvx_observe_functions_t* functions_;
  kvx_observe_publisher* publisher_;
};

}  // namespace kvx::observe
