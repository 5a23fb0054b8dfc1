// TierChain: what leaves every tier and every store at once.
#include <algorithm>
#include <unordered_map>

#include "tier/chain/tier_chain.hpp"

namespace kvx::tier {
namespace {

using cache::BlockKind;
using cache::ContentHash;

constexpr size_t kKeysOfACall = 1000;

// Hashes of blocks as stores know them, from the pool's scope on: a tier's own begin elsewhere.
class StoreHashes {
 public:
  StoreHashes(cache::HashAlgorithm algorithm, const ContentHash& scope)
      : algorithm_(algorithm), scope_(scope) {}

  // Of a node of any tier's index.
  ContentHash of(const cache::PrefixIndex& index, int32_t node) {
    std::vector<int32_t> way;
    while (!index.is_scope(node) && !known_.contains(node)) {
      way.push_back(node);
      node = index.parent(node);
    }
    ContentHash hash = index.is_scope(node) ? scope_ : known_.at(node);
    for (; !way.empty(); way.pop_back()) {
      hash = cache::hash_block(algorithm_, hash, index.tokens(way.back()));
      known_.emplace(way.back(), hash);
    }
    return hash;
  }

 private:
  cache::HashAlgorithm algorithm_;
  ContentHash scope_;
  std::unordered_map<int32_t, ContentHash> known_;
};

// Of the session's own full blocks, which a store may have though nobody here remembers them.
void add_hashes_of_tokens(cache::HashAlgorithm algorithm, const ContentHash& scope,
                          const cache::Erasure& erasure, size_t block_size,
                          std::vector<ContentHash>& hashes) {
  ContentHash hash = scope;
  int64_t block = 0;
  for (auto tokens = erasure.tokens; tokens.size() >= block_size; ++block) {
    hash = cache::hash_block(algorithm, hash, tokens.first(block_size));
    if (block >= erasure.first_block) hashes.push_back(hash);
    tokens = tokens.subspan(block_size);
  }
}

}  // namespace

int64_t TierChain::erase(const cache::Erasure& erasure) {
  int64_t num_erased = 0;
  for (const auto& one : tiers_) num_erased += one->erase(erasure);
  for (const auto& one : demotions_) one->scrub();
  for (const auto& one : stores_) one->scrub();
  return num_erased;
}

Result<StoreErasure> TierChain::store_erasure(const cache::Erasure& erasure,
                                              std::span<const int32_t> first_nodes) const {
  if (stores_.empty()) return StoreErasure{};
  if (erasure.is_whole_tenant) return StoreErasure{tenant_parts(erasure.keys.tenant), {}};
  KVX_ASSIGN_OR_RETURN(const int32_t first_scope, first_.index->pin_scope(erasure.keys));
  const ContentHash root = first_.index->hash(first_scope);
  first_.index->unpin(first_scope);
  std::vector<ContentHash> hashes;
  for (const int32_t node : first_nodes) hashes.push_back(first_.index->hash(node));
  for (const auto& one : tiers_) {
    StoreHashes known(algorithm_, root);
    for (const int32_t node : cache::nodes_of(one->nodes(), erasure)) {
      hashes.push_back(known.of(one->nodes(), node));
    }
  }
  add_hashes_of_tokens(algorithm_, root, erasure, static_cast<size_t>(first_.shape->block_size),
                       hashes);
  std::ranges::sort(hashes);
  hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
  const StoreScope scope = store_scope_of(algorithm_, fingerprint_, erasure.keys);
  StoreErasure found;
  for (const ContentHash& hash : hashes) {
    for (int group = 0; group < static_cast<int>(first_.shape->groups.size()); ++group) {
      for (const BlockKind kind : {BlockKind::kPacked, BlockKind::kFullPrecision}) {
        found.keys.push_back(BlockName{scope, {}, hash, {}, group, kind}.key());
      }
    }
  }
  return found;
}

Status TierChain::erase_from_stores(const StoreErasure& erasure) const {
  Status first;
  const auto keep_first = [&first](const Status& status) {
    if (first.ok()) first = status;
  };
  for (const auto& one : stores_) {
    if (!erasure.parts.empty()) keep_first(one->its_store().remove_all(erasure.parts));
    std::span<const std::string> rest = erasure.keys;
    while (!rest.empty()) {
      const auto some = rest.first(std::min(rest.size(), kKeysOfACall));
      rest = rest.subspan(some.size());
      const Status removed = one->its_store().remove(some);
      keep_first(removed);
      if (!removed.ok()) break;
    }
  }
  return first;
}

}  // namespace kvx::tier
