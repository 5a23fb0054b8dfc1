// Names of blocks in stores.
#include "tier/store/block_name.hpp"

#include <fmt/format.h>

namespace kvx::tier {

std::string BlockName::key() const {
  return fmt::format("{}/{}-{}{}", scope.parts, hex(hash), group,
                     kind == cache::BlockKind::kFullPrecision ? 'f' : 'p');
}

std::string tenant_parts(std::string_view tenant) {
  if (tenant.empty()) return "kvx1/shared";
  return fmt::format("kvx1/{}", hex(cache::hash_scope(cache::HashAlgorithm::kSha256, tenant)));
}

StoreScope store_scope_of(cache::HashAlgorithm algorithm, std::string_view fingerprint,
                          const cache::PrefixKeys& keys) {
  StoreScope scope;
  scope.hash = cache::hash_scope(algorithm, cache::scope_of(fingerprint, keys));
  scope.parts = fmt::format("{}/{}", tenant_parts(keys.tenant), hex(scope.hash));
  return scope;
}

}  // namespace kvx::tier
