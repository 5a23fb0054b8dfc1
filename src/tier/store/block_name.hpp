// BlockName: which block a record in a store is, and the key that it lies under:
//
//   kvx1/TENANT/SCOPE/HASH-0p    of layer group 0, packed; -0f: full-precision
//
// SCOPE hashes all that decides a block's bytes beside its tokens (model, recipe, order, tables)
// and the caller's keys; HASH is the chain's up to the block. TENANT hashes the tenant's salt
// alone, so that all of its blocks can be removed; "shared" is nobody's.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cache/prefix/content_hash.hpp"
#include "cache/prefix/match_parts.hpp"

namespace kvx::tier {

// What a sequence's blocks have in common.
struct StoreScope {
  std::string parts;  // kvx1/TENANT/SCOPE
  cache::ContentHash hash;
};

struct BlockName {
  StoreScope scope;
  cache::ContentHash parent;
  cache::ContentHash hash;
  std::vector<int32_t> tokens;
  int group = 0;
  cache::BlockKind kind = cache::BlockKind::kPacked;

  std::string key() const;
};

// kvx1/TENANT.
std::string tenant_parts(std::string_view tenant);
// fingerprint: with all that decides how a block lies in the pool.
StoreScope store_scope_of(cache::HashAlgorithm algorithm, std::string_view fingerprint,
                          const cache::PrefixKeys& keys);

}  // namespace kvx::tier
