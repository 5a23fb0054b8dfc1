// replay: a trace through the block manager itself (pool, prefix index, policy), without bytes.
#pragma once

#include <functional>
#include <optional>

#include "cache/prefix/eviction_policy.hpp"
#include "tools/kvx/replay/trace.hpp"

namespace kvx::tool {

struct ReplayCounters {
  int64_t num_requests = 0;
  int64_t num_too_long = 0;  // more blocks than there are: computed without the cache
  int64_t input_tokens = 0;
  int64_t hit_tokens = 0;       // from any tier: prefill that was saved
  int64_t host_hit_tokens = 0;  // of them, from host memory
  int64_t num_evicted = 0;      // from the first tier
  int64_t most_blocks = 0;      // that the first tier held
  int64_t most_host_blocks = 0;

  double hit_rate() const {
    return input_tokens == 0 ? 0
                             : static_cast<double>(hit_tokens) / static_cast<double>(input_tokens);
  }
};

struct ReplayOptions {
  int64_t num_blocks = 0;  // of the first tier
  int64_t num_host_blocks =
      0;  // of host memory behind it, which gets a copy of every block; 0: none
  cache::EvictionKind eviction = cache::EvictionKind::kLru;
};

// Requests one after the other, in the trace's order; a request's blocks are in use while it runs.
// on_progress: called now and then with the share that is done. INVALID_ARGUMENT: a count < 1.
Result<ReplayCounters> replay(const std::vector<TraceRequest>& trace, const ReplayOptions& options,
                              const std::function<void(double)>& on_progress);

}  // namespace kvx::tool
