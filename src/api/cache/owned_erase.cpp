// kvx_cache_erase_tenant and kvx_cache_erase_session.
#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"

namespace kvx::boundary {
namespace {

Status count(Result<int64_t> erased, int64_t* num_erased) {
  if (!erased.ok()) return erased.error();
  if (num_erased != nullptr) *num_erased = erased.value();
  return {};
}

Status erase_tenant(kvx_cache_t handle, const char* tenant, int64_t* num_erased) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (tenant == nullptr) return invalid_argument("tenant is null");
  return count(owned->cache->erase_tenant(tenant), num_erased);
}

Status erase_session(kvx_cache_t handle, const kvx_prefix_keys_t* caller_keys,
                     const int32_t* tokens, int64_t num_tokens, int64_t first_token,
                     int64_t* num_erased) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const cache::PrefixKeys keys, read_keys(caller_keys));
  KVX_ASSIGN_OR_RETURN(const std::span<const int32_t> session, read_tokens(tokens, num_tokens));
  return count(owned->cache->erase_session(keys, session, first_token), num_erased);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_cache_erase_tenant(kvx_cache_t cache, const char* tenant,
                                               int64_t* num_erased) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::erase_tenant(cache, tenant, num_erased); });
}

extern "C" kvx_status_t kvx_cache_erase_session(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                                const int32_t* tokens, int64_t num_tokens,
                                                int64_t first_token, int64_t* num_erased) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::erase_session(cache, keys, tokens, num_tokens, first_token, num_erased);
  });
}
