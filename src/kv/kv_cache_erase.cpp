// KvCache: a tenant's or a session's blocks leave pool, tiers and stores at once.
#include "cache/prefix/erasure.hpp"
#include "kv/kv_cache.hpp"

namespace kvx::kv {

Result<int64_t> KvCache::erase_tenant(const std::string& tenant) {
  if (tenant.empty()) {
    return invalid_argument(
        "tenant is ''; expected a tenant's name: blocks without one are everybody's");
  }
  return erase({{"", "", tenant}, true, {}, 0});
}

Result<int64_t> KvCache::erase_session(const cache::PrefixKeys& keys,
                                       std::span<const int32_t> tokens, int64_t first_token) {
  if (first_token < 0 || first_token > std::ssize(tokens)) {
    return out_of_range("first_token is {}; expected 0 to num_tokens, {}", first_token,
                        tokens.size());
  }
  return erase({keys, false, tokens, first_token / storage().config.block_size});
}

Result<int64_t> KvCache::erase(const cache::Erasure& erasure) {
  if (!table_->prefixes) return prefixes_are_off();
  tier::StoreErasure in_stores;
  int64_t num_erased = 0;
  {
    const auto lock = table_->lock_at_rest();
    PrefixCache& prefixes = *table_->prefixes;
    const std::vector<int32_t> nodes = cache::nodes_of(prefixes.index(), erasure);
    for (int sequence = 0; erasure.is_whole_tenant && sequence < storage().config.max_sequences;
         ++sequence) {
      if (!table_->holds(sequence) || prefixes.keys(sequence).tenant != erasure.keys.tenant) {
        continue;
      }
      return invalid_argument("tenant is '{}', who has sequence {}; free it first",
                              erasure.keys.tenant, sequence);
    }
    const int32_t used =
        cache::block_in_use(*storage().pool, prefixes.index(), prefixes.shape(), nodes);
    if (used != cache::kNoBlock) {
      return invalid_argument(
          "block {} is to be erased, and a sequence or a prefetch uses it; free it first", used);
    }
    if (table_->tiers) {
      KVX_ASSIGN_OR_RETURN(in_stores, table_->tiers->store_erasure(erasure, nodes));
      num_erased += table_->tiers->erase(erasure);
    }
    num_erased += cache::forget_blocks(*storage().pool, prefixes.index(), prefixes.shape(), nodes);
    cache::clear_free_blocks(*storage().pool);
  }
  // The lock is open: a store may take its time.
  if (!table_->tiers) return num_erased;
  const Status removed = table_->tiers->erase_from_stores(in_stores);
  if (removed.ok()) return num_erased;
  return internal_error(
      "{} blocks are erased here, and a store has kept its records: {}; call again", num_erased,
      removed.error().message);
}

}  // namespace kvx::kv
