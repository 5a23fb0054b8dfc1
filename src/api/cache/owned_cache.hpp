// What stands behind the handles of caches that own their memory.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "api/cache/callers_memory.hpp"
#include "api/executor.hpp"
#include "kv/kv_cache.hpp"

namespace kvx::boundary {

// What callers call a sequence: its place in the cache in the low bits, above them how many
// sequences have ended there. A number comes back after 2^31 / max_sequences of them.
class SequenceNumbers {
 public:
  explicit SequenceNumbers(int max_sequences);

  int32_t number_of(int sequence) const;
  // The cache's own index; -1 for a number of a sequence that has ended there.
  int sequence_of(int32_t number) const;
  // The sequence in this place has ended.
  void retire(int sequence);

 private:
  int index_bits_;
  std::vector<int32_t> num_ended_;  // [max_sequences]
};

// The executor and the memory outlive the cache that runs on them.
struct OwnedCache {
  std::optional<CallersMemory> callers_memory;
  std::optional<CallersExecutor> callers_threads;
  std::unique_ptr<Executor> own_threads;
  std::unique_ptr<kv::KvCache> cache;
  SequenceNumbers numbers{1};
  std::unordered_map<uint64_t, kv::Prefetch> prefetches;  // by handle; they end before the cache
  uint64_t last_prefetch = 0;
  bool is_in_listener = false;  // the caller's listener is running

  // INVALID_ARGUMENT: the number is not that of a living sequence.
  Result<int> sequence(int32_t number) const;
};

// INVALID_ARGUMENT: null, a handle that was freed or never was, a call from inside a listener.
Result<OwnedCache*> find_cache(kvx_cache_t handle);

// Null: no keys.
Result<cache::PrefixKeys> read_keys(const kvx_prefix_keys_t* caller);
Result<std::span<const int32_t>> read_tokens(const int32_t* tokens, int64_t num_tokens);

// An out struct that can be filled. INVALID_ARGUMENT: null, or a size below 8.
template <class Struct>
Status check_out_struct(const Struct* caller, std::string_view name) {
  if (caller == nullptr) return invalid_argument("{} is null", name);
  constexpr uint32_t kLeast = 8;  // size and the first field
  if (caller->size >= kLeast) return {};
  return invalid_argument("{}.size is {}; expected {}", name, caller->size, sizeof(Struct));
}

// Fills an out struct up to its caller's size and sets size to what was filled. Errors as
// check_out_struct.
template <class Struct>
Status write_struct(Struct answer, Struct* caller, std::string_view name) {
  KVX_RETURN_IF_ERROR(check_out_struct(caller, name));
  answer.size = std::min<uint32_t>(caller->size, sizeof answer);
  memcpy(caller, &answer, answer.size);
  return {};
}

}  // namespace kvx::boundary
