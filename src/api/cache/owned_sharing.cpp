// What sequences of a cache share: prefixes, forks, truncation, verification steps, eviction.
#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"

namespace kvx::boundary {

Result<cache::PrefixKeys> read_keys(const kvx_prefix_keys_t* caller) {
  if (caller == nullptr) return cache::PrefixKeys{};
  KVX_ASSIGN_OR_RETURN(const kvx_prefix_keys_t args, read_struct(caller, "keys"));
  if (args.reserved != 0) return invalid_argument("keys.reserved is {}; expected 0", args.reserved);
  const auto text = [](const char* key) { return std::string(key == nullptr ? "" : key); };
  return cache::PrefixKeys{text(args.adapter), text(args.image), text(args.tenant)};
}

Result<std::span<const int32_t>> read_tokens(const int32_t* tokens, int64_t num_tokens) {
  if (num_tokens < 0) return invalid_argument("num_tokens is {}; expected 0 or more", num_tokens);
  if (num_tokens > 0 && tokens == nullptr) return invalid_argument("tokens is null");
  return std::span(tokens, static_cast<size_t>(num_tokens));
}

namespace {

Result<std::string> read_session(const kvx_prefix_keys_t* caller) {
  if (caller == nullptr) return std::string();
  KVX_ASSIGN_OR_RETURN(const kvx_prefix_keys_t args, read_struct(caller, "keys"));
  return std::string(args.session == nullptr ? "" : args.session);
}

Status create_from(kvx_cache_t handle, const kvx_prefix_keys_t* caller_keys, const int32_t* tokens,
                   int64_t num_tokens, tier::LoadOrder order, int32_t* sequence,
                   int64_t* num_found) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (sequence == nullptr) return invalid_argument("sequence is null");
  KVX_ASSIGN_OR_RETURN(const cache::PrefixKeys keys, read_keys(caller_keys));
  KVX_ASSIGN_OR_RETURN(const std::span<const int32_t> wanted, read_tokens(tokens, num_tokens));
  KVX_ASSIGN_OR_RETURN(const std::string session, read_session(caller_keys));
  KVX_ASSIGN_OR_RETURN(const int index,
                       owned->cache->create_sequence_from(keys, wanted, session, order));
  *sequence = owned->numbers.number_of(index);
  if (num_found != nullptr) *num_found = owned->cache->num_tokens(index);
  return {};
}

Status record(kvx_cache_t handle, int32_t sequence, const int32_t* tokens, int64_t num_tokens) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  KVX_ASSIGN_OR_RETURN(const std::span<const int32_t> added, read_tokens(tokens, num_tokens));
  return owned->cache->record_tokens(index, added);
}

Status recorded(kvx_cache_t handle, int32_t sequence, int32_t* tokens, int64_t capacity,
                int64_t* num_tokens) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  if (num_tokens == nullptr) return invalid_argument("num_tokens is null");
  if (capacity < 0) return invalid_argument("capacity is {}; expected 0 or more", capacity);
  if (capacity > 0 && tokens == nullptr) return invalid_argument("tokens is null");
  const std::span<const int32_t> all = owned->cache->recorded_tokens(index);
  *num_tokens = static_cast<int64_t>(all.size());
  std::copy_n(all.begin(), std::min(capacity, *num_tokens), tokens);
  return {};
}

Status fork(kvx_cache_t handle, int32_t sequence, int32_t* fork) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  if (fork == nullptr) return invalid_argument("fork is null");
  KVX_ASSIGN_OR_RETURN(const int forked, owned->cache->fork_sequence(index));
  *fork = owned->numbers.number_of(forked);
  return {};
}

Status truncate(kvx_cache_t handle, int32_t sequence, int64_t num_tokens) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  return owned->cache->truncate_sequence(index, num_tokens);
}

Status end_kept(kvx_cache_t handle, uint32_t num_entries, const int32_t* kept_tokens) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (num_entries != 0 && kept_tokens == nullptr) return invalid_argument("kept_tokens is null");
  KVX_RETURN_IF_ERROR(owned->cache->check_step_rows());
  return owned->cache->end_step(std::span(kept_tokens, num_entries));
}

Status evict(kvx_cache_t handle, int64_t num_blocks, int64_t* num_evicted) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int64_t evicted, owned->cache->evict_blocks(num_blocks));
  if (num_evicted != nullptr) *num_evicted = evicted;
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_sequence_create_from(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                                 const int32_t* tokens, int64_t num_tokens,
                                                 int32_t* sequence, int64_t* num_found) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::create_from(cache, keys, tokens, num_tokens,
                                      kvx::tier::LoadOrder::kWholeBlocks, sequence, num_found);
  });
}

extern "C" kvx_status_t kvx_sequence_create_loading(kvx_cache_t cache,
                                                    const kvx_prefix_keys_t* keys,
                                                    const int32_t* tokens, int64_t num_tokens,
                                                    int32_t* sequence, int64_t* num_found) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::create_from(cache, keys, tokens, num_tokens,
                                      kvx::tier::LoadOrder::kLayerByLayer, sequence, num_found);
  });
}

extern "C" kvx_status_t kvx_sequence_record(kvx_cache_t cache, int32_t sequence,
                                            const int32_t* tokens, int64_t num_tokens) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::record(cache, sequence, tokens, num_tokens); });
}

extern "C" kvx_status_t kvx_sequence_recorded(kvx_cache_t cache, int32_t sequence, int32_t* tokens,
                                              int64_t capacity, int64_t* num_tokens) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::recorded(cache, sequence, tokens, capacity, num_tokens); });
}

extern "C" kvx_status_t kvx_sequence_fork(kvx_cache_t cache, int32_t sequence, int32_t* fork) {
  return kvx::boundary::run_call([&] { return kvx::boundary::fork(cache, sequence, fork); });
}

extern "C" kvx_status_t kvx_sequence_truncate(kvx_cache_t cache, int32_t sequence,
                                              int64_t num_tokens) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::truncate(cache, sequence, num_tokens); });
}

extern "C" kvx_status_t kvx_step_end_kept(kvx_cache_t cache, uint32_t num_entries,
                                          const int32_t* kept_tokens) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::end_kept(cache, num_entries, kept_tokens); });
}

extern "C" kvx_status_t kvx_step_cancel(kvx_cache_t cache) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    KVX_ASSIGN_OR_RETURN(kvx::boundary::OwnedCache * owned, kvx::boundary::find_cache(cache));
    return owned->cache->cancel_step();
  });
}

extern "C" kvx_status_t kvx_cache_evict(kvx_cache_t cache, int64_t num_blocks,
                                        int64_t* num_evicted) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::evict(cache, num_blocks, num_evicted); });
}

extern "C" kvx_status_t kvx_cache_clear_prefixes(kvx_cache_t cache) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    KVX_ASSIGN_OR_RETURN(kvx::boundary::OwnedCache * owned, kvx::boundary::find_cache(cache));
    return owned->cache->clear_prefixes();
  });
}
