// OwnedCache: the cache behind a kvx_cache_t.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "api/cache/callers_memory.hpp"
#include "api/checks/out_structs.hpp"
#include "api/executor.hpp"
#include "kv/kv_cache.hpp"
#include "observe/event_publisher.hpp"
#include "observe/metrics_server.hpp"

namespace kvx::boundary {

// SequenceNumbers maps the numbers that callers have for sequences to the cache's indices. A number
// holds the index in its low bits and above it a count of the sequences that have ended at that
// index. The same number comes back after 2^31 / max_sequences of them.
class SequenceNumbers {
 public:
  explicit SequenceNumbers(int max_sequences);

  int32_t number_of(int sequence) const;
  // Returns the cache's index, or -1 when the number's sequence has ended.
  int sequence_of(int32_t number) const;
  // Ends the sequence at this index: its number becomes invalid.
  void retire(int sequence);

 private:
  int index_bits_;
  std::vector<int32_t> num_ended_;  // [max_sequences]
};

// The members' order matters: the cache is destroyed before the executor and the memory that it
// uses.
struct OwnedCache {
  std::optional<CallersMemory> callers_memory;
  std::optional<CallersExecutor> callers_threads;
  std::unique_ptr<Executor> own_threads;
  std::unique_ptr<kv::KvCache> cache;
  std::optional<observe::ShownCache> shown;
  std::unique_ptr<observe::EventPublisher> publisher;  // null: nobody is told
  SequenceNumbers numbers{1};
  std::unordered_map<uint64_t, kv::Prefetch> prefetches;  // by handle; destroyed before the cache
  uint64_t last_prefetch = 0;
  bool is_in_listener = false;  // the caller's listener is running

  // Returns a sequence's index. INVALID_ARGUMENT: no sequence in use has this number.
  Result<int> sequence(int32_t number) const;
};

// INVALID_ARGUMENT: null, a handle that was freed or never existed, or a call from inside a
// listener.
Result<OwnedCache*> find_cache(kvx_cache_t handle);

// Reads a caller's keys. Null means no keys.
Result<cache::PrefixKeys> read_keys(const kvx_prefix_keys_t* caller);
Result<std::span<const int32_t>> read_tokens(const int32_t* tokens, int64_t num_tokens);

// Copies at most `capacity` bytes of a text to the caller, the last of them 0. bytes: the size of
// the whole with its 0. INVALID_ARGUMENT: bytes is null, or text is and capacity is not 0.
Status copy_text(std::string_view whole, char* text, uint64_t capacity, uint64_t* bytes);

}  // namespace kvx::boundary
