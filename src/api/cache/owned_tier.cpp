// The tiers of a cache: kvx_cache_prefetch, kvx_prefetch_*, kvx_cache_wait_for_tiers, and sequences
// that load layer by layer.
#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"

namespace kvx::boundary {
namespace {

Status prefetch(kvx_cache_t handle, const kvx_prefix_keys_t* caller_keys, const int32_t* tokens,
                int64_t num_tokens, uint64_t* result) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (result == nullptr) return invalid_argument("prefetch is null");
  KVX_ASSIGN_OR_RETURN(const cache::PrefixKeys keys, read_keys(caller_keys));
  KVX_ASSIGN_OR_RETURN(const std::span<const int32_t> wanted, read_tokens(tokens, num_tokens));
  KVX_ASSIGN_OR_RETURN(kv::Prefetch started, owned->cache->prefetch(keys, wanted));
  owned->prefetches.emplace(++owned->last_prefetch, std::move(started));
  *result = owned->last_prefetch;
  return {};
}

Error unknown_prefetch(uint64_t number) {
  return invalid_argument("prefetch is {}; it has ended, or never existed", number);
}

Status is_done(kvx_cache_t handle, uint64_t number, uint32_t* result) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (result == nullptr) return invalid_argument("is_done is null");
  const auto found = owned->prefetches.find(number);
  if (found == owned->prefetches.end()) return unknown_prefetch(number);
  *result = found->second.is_done() ? 1 : 0;
  return {};
}

Status end(kvx_cache_t handle, uint64_t number) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (owned->prefetches.erase(number) == 0) return unknown_prefetch(number);
  return {};
}

Status wait_for_layer(kvx_cache_t handle, int32_t sequence, uint32_t layer) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  const auto num_layers = static_cast<uint32_t>(owned->cache->config().geometry.num_layers);
  if (layer >= num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer, num_layers - 1);
  }
  return owned->cache->wait_for_layer(index, static_cast<int>(layer));
}

Status end_loading(kvx_cache_t handle, int32_t sequence, int64_t* num_tokens) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  KVX_RETURN_IF_ERROR(owned->cache->end_loading(index));
  if (num_tokens != nullptr) *num_tokens = owned->cache->num_tokens(index);
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_sequence_wait_for_layer(kvx_cache_t cache, int32_t sequence,
                                                    uint32_t layer) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::wait_for_layer(cache, sequence, layer); });
}

extern "C" kvx_status_t kvx_sequence_end_loading(kvx_cache_t cache, int32_t sequence,
                                                 int64_t* num_tokens) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::end_loading(cache, sequence, num_tokens); });
}

extern "C" kvx_status_t kvx_cache_prefetch(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                           const int32_t* tokens, int64_t num_tokens,
                                           uint64_t* prefetch) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::prefetch(cache, keys, tokens, num_tokens, prefetch); });
}

extern "C" kvx_status_t kvx_prefetch_is_done(kvx_cache_t cache, uint64_t prefetch,
                                             uint32_t* is_done) {
  return kvx::boundary::run_call([&] { return kvx::boundary::is_done(cache, prefetch, is_done); });
}

extern "C" kvx_status_t kvx_prefetch_end(kvx_cache_t cache, uint64_t prefetch) {
  return kvx::boundary::run_call([&] { return kvx::boundary::end(cache, prefetch); });
}

extern "C" kvx_status_t kvx_cache_wait_for_tiers(kvx_cache_t cache) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    KVX_ASSIGN_OR_RETURN(kvx::boundary::OwnedCache * owned, kvx::boundary::find_cache(cache));
    owned->cache->wait_for_tiers();
    return {};
  });
}
