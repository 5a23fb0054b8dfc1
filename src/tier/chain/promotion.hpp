// Promotion: blocks on their way from the tiers back to the pool, and those that were there
// already. None of them is evicted until the promotion is released.
//
// Layer by layer, a sequence may use blocks of tiers of this process before all of their layers are
// there: the first layer of all blocks comes first, then the second one. Nobody else finds a block
// before it has come whole. What a step needs of all layers at once, the full-precision blocks at
// the end, comes whole, and so does what stores have.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cache/prefix/prefix_index.hpp"
#include "tier/block_parts.hpp"
#include "tier/transfer_queue.hpp"

namespace kvx::tier {

class HostTier;
class RemoteTier;
class StoreLookup;
struct StoreScope;

// A block that a tier has and the pool has not.
struct TierLoad {
  int group = 0;
  cache::BlockKind kind = cache::BlockKind::kPacked;
  int block_class = 0;
  int32_t node = cache::kNoNode;       // of the first tier's index
  int32_t first_id = cache::kNoBlock;  // of the pool
  int32_t from_id = cache::kNoBlock;   // of the tier
};

// A block whose parts come one by one.
struct BlockInParts {
  std::shared_ptr<std::string> problem;  // the promotion's
  bool is_bad = false;                   // a part of it did not come whole
};

struct Promotion {
  struct UnderWay {
    HostTier* tier = nullptr;
    std::shared_ptr<TransferGroup> group;
  };
  // Nobody waits for it beyond `end`: what comes later is found by the next.
  struct FromStore {
    RemoteTier* tier = nullptr;
    std::shared_ptr<TransferGroup> group;
    std::chrono::steady_clock::time_point end;
  };
  // Blocks that come layer by layer: what each layer waits for.
  struct Layers {
    HostTier* tier = nullptr;
    std::vector<std::shared_ptr<TransferGroup>> groups;  // [layers]
  };
  std::vector<UnderWay> under_way;     // one a tier: what comes whole
  std::vector<FromStore> from_stores;  // one a store that has answered
  std::vector<Layers> layers;          // one a tier, or none: nothing comes layer by layer
  cache::ComingBlocks coming;          // what comes layer by layer, as its sequence names it
  // Of a block that did not come whole; empty: none. collect() writes it.
  std::shared_ptr<std::string> problem = std::make_shared<std::string>();
  int64_t num_loads = 0;
  bool ran_short = false;                     // no room for more in the pool or its index
  std::vector<std::pair<int, int32_t>> held;  // class and id in the pool
  std::vector<int32_t> pinned;                // nodes of the first tier's index
};

// A tier, and the scope of the tokens in its index.
struct TierScope {
  HostTier* tier = nullptr;
  int32_t scope = cache::kNoNode;
};

// A store, and what it was asked for.
struct StoreAnswer {
  RemoteTier* tier = nullptr;
  std::shared_ptr<StoreLookup> lookup;
};

// The pool and its index.
struct FirstTier {
  cache::BlockPool* pool = nullptr;
  cache::PrefixIndex* index = nullptr;
  const cache::SequenceShape* shape = nullptr;
  const BlockParts* parts = nullptr;  // null: blocks come whole
};

enum class LoadOrder : uint8_t { kWholeBlocks, kLayerByLayer };

// Blocks that begin the tokens set out for the pool, as far as it has room: as many as all tiers
// and the pool can serve together, each from the first tier that has it. Requires: all scopes are
// pinned until release_promotion(), which needs is_done(), is_layer_there() of the last layer, and
// then every tier's collect().
Promotion promote(const FirstTier& first, int32_t first_scope, std::span<const TierScope> tiers,
                  std::span<const int32_t> tokens, int64_t max_blocks,
                  std::span<const StoreAnswer> answers = {},
                  LoadOrder order = LoadOrder::kWholeBlocks);
// What stores should be asked for, so that promote() can serve more: null when pool and tiers serve
// all of it.
std::shared_ptr<StoreLookup> make_lookup(const FirstTier& first, int32_t first_scope,
                                         std::span<const TierScope> tiers,
                                         std::span<const int32_t> tokens, int64_t max_blocks,
                                         const StoreScope& scope, cache::HashAlgorithm algorithm);
void release_promotion(const FirstTier& first, Promotion& promotion);

// These are about what comes whole.
bool is_done(const Promotion& promotion);
void wait(const Promotion& promotion);
// Until some of it has finished, or all.
void wait_for_some(const Promotion& promotion);

// These are about layers [0, layer] of what comes layer by layer. collect() finds out whether a
// block came whole.
bool is_layer_there(const Promotion& promotion, int layer);
void wait_for_layer(const Promotion& promotion, int layer);
inline int num_layers(const Promotion& promotion) {
  return promotion.layers.empty() ? 0 : static_cast<int>(promotion.layers.front().groups.size());
}

}  // namespace kvx::tier
