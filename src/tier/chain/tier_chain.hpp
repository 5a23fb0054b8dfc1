// TierChain: the tiers behind a pool, nearest first.
//
//   pool ── every block that can be found ──▶ tier 1 ── what it would evict next ──▶ tier 2 ── ...
//     ◀──── what a prefix lacks, from the nearest tier that has it ────────────────────┘
//
// One thread at a time (the cache's lock), but for the waits.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "tier/chain/demotion.hpp"
#include "tier/chain/promotion.hpp"
#include "tier/host_tier.hpp"
#include "tier/store/remote_tier.hpp"

namespace kvx::tier {

// A sequence's nodes in the index of each tier, and what its blocks have in common in stores.
struct Way {
  struct InTier {
    int32_t scope = cache::kNoNode;
    int32_t session = cache::kNoSession;
    std::vector<int32_t> nodes;  // of full blocks; fewer than there are when the index was full

    int32_t tip() const { return nodes.empty() ? scope : nodes.back(); }
  };
  std::vector<InTier> tiers;
  StoreScope store_scope;
};

// Keys of stores: all under `parts`, or these.
struct StoreErasure {
  std::string parts;
  std::vector<std::string> keys;
};

class TierChain {
 public:
  // What joins a tier to the pool: one call a tier.
  using MakeLink = std::function<Result<TierLink>()>;

  // first's parts outlive the chain. fingerprint: with all that decides how a block lies in the
  // pool. Errors as HostTier::create's and open_store's.
  static Result<std::unique_ptr<TierChain>> create(const FirstTier& first, std::string fingerprint,
                                                   cache::HashAlgorithm algorithm,
                                                   std::span<const TierConfig> configs,
                                                   const MakeLink& make_link);

  // ---- a sequence's way

  // session: of the sequence, "" for none. Errors as PrefixIndex::pin_scope's, nothing changed.
  Status begin(Way& way, const cache::PrefixKeys& keys, std::string_view session = {});
  void end(Way& way);
  // Requires: `to` is empty.
  void fork(const Way& from, Way& to);
  void truncate(Way& way, int64_t num_blocks);
  // The way gets as long as num_blocks, or as there is room for nodes.
  void follow(Way& way, std::span<const int32_t> tokens, int64_t num_blocks);

  // A block of the pool that can be found sets out for the first tier, unless that has it.
  void store(const Way& way, int64_t block, int group, cache::BlockKind kind, int32_t first_id);
  Promotion promote(int32_t first_scope, const Way& way, std::span<const int32_t> tokens,
                    int64_t max_blocks, std::span<const StoreAnswer> answers = {},
                    LoadOrder order = LoadOrder::kWholeBlocks);
  // Asks the stores for what pool and tiers have not got of the tokens; none: nobody is asked.
  std::vector<StoreAnswer> look_up(int32_t first_scope, const Way& way,
                                   std::span<const int32_t> tokens, int64_t max_blocks);
  // Requires: is_done() and then collect().
  void release(Promotion& promotion) { release_promotion(first_, promotion); }

  // ---- what is under way

  // Commits what has finished, and sends on what must make room.
  void collect();
  bool is_idle() const;
  // Until nothing is under way. A store's calls count as long as they need a block of the pool.
  void wait_for_all() const;
  // Until nothing waits for a store any more.
  void wait_for_stores() const;
  // Blocks of the pool that are on their way to a tier.
  int64_t num_stores() const;
  // Loads from stores that come too late for whoever wanted them give their blocks back.
  bool has_late_loads() const;
  void cancel_late_loads();
  // Blocks of the pool that have not begun their way to a disk or a store stay in the pool alone;
  // copies in memory are soon done.
  void cancel_waiting_stores();
  // Whether blocks of the pool wait until blocks of the first tier have moved down.
  bool has_stores_without_room() const;
  // Until nothing moves down, or up to a moment; whether nothing does.
  bool wait_for_room_until(std::chrono::steady_clock::time_point end) const;
  // Those that wait take other blocks' places, which are lost.
  void make_room_for_stores();
  // Until no block of the pool is on its way to a tier, or up to a moment; whether none is.
  bool wait_for_stores_until(std::chrono::steady_clock::time_point end) const;

  // Whether nothing waits for a store either. Requires: the cache's lock.
  bool is_at_rest() const;

  // Forgets everything. Requires: is_idle().
  Status clear();

  // ---- erasure (erasure.cpp)

  // Forgets what is meant in the tiers of this process, and leaves no bytes of it; how many blocks.
  // Requires: is_at_rest().
  int64_t erase(const cache::Erasure& erasure);
  // What is to be removed from the stores: first_nodes are the pool's that are meant. Before
  // erase(), which forgets nodes that the answer needs. Errors as PrefixIndex::pin_scope's.
  Result<StoreErasure> store_erasure(const cache::Erasure& erasure,
                                     std::span<const int32_t> first_nodes) const;
  // From any thread, without the cache's lock. All stores are asked; the first error.
  Status erase_from_stores(const StoreErasure& erasure) const;

  // ---- what there is

  std::vector<HostTierSnapshot> snapshot() const;
  void set_listener(const std::function<void(const cache::PrefixEvent&)>& listener);
  int num_tiers() const { return static_cast<int>(tiers_.size()); }
  HostTier& tier(int i) { return *tiers_[i]; }

 private:
  TierChain(const FirstTier& first, std::string fingerprint, cache::HashAlgorithm algorithm)
      : first_(first), fingerprint_(std::move(fingerprint)), algorithm_(algorithm) {}
  Status add_store(const TierConfig& config, const MakeLink& make_link);
  std::vector<TierScope> scopes_of(const Way& way) const;

  FirstTier first_;
  std::string fingerprint_;
  cache::HashAlgorithm algorithm_;
  std::vector<std::unique_ptr<HostTier>> tiers_;
  std::vector<std::unique_ptr<Demotion>> demotions_;  // [i]: from tier i to i + 1
  std::vector<std::unique_ptr<RemoteTier>> stores_;
};

}  // namespace kvx::tier
