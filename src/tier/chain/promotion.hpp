// Promotion: blocks on their way from the tiers back to the pool, and those that were there
// already. None of them is evicted until the promotion is released.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cache/prefix/prefix_index.hpp"
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
  std::vector<UnderWay> under_way;     // one a tier
  std::vector<FromStore> from_stores;  // one a store that has answered
  int64_t num_loads = 0;
  bool ran_short = false;                     // the pool had no room for more
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
};

// Blocks that begin the tokens set out for the pool, as far as it has room: as many as all tiers
// and the pool can serve together, each from the first tier that has it. Requires: all scopes are
// pinned until release_promotion(), which needs is_done() and then every tier's collect().
Promotion promote(const FirstTier& first, int32_t first_scope, std::span<const TierScope> tiers,
                  std::span<const int32_t> tokens, int64_t max_blocks,
                  std::span<const StoreAnswer> answers = {});
// What stores should be asked for, so that promote() can serve more: null when pool and tiers serve
// all of it.
std::shared_ptr<StoreLookup> make_lookup(const FirstTier& first, int32_t first_scope,
                                         std::span<const TierScope> tiers,
                                         std::span<const int32_t> tokens, int64_t max_blocks,
                                         const StoreScope& scope, cache::HashAlgorithm algorithm);
void release_promotion(const FirstTier& first, Promotion& promotion);

bool is_done(const Promotion& promotion);
void wait(const Promotion& promotion);
// Until some of it has finished, or all.
void wait_for_some(const Promotion& promotion);

}  // namespace kvx::tier
