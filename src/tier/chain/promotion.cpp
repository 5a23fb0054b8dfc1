// Promotions: one match over the pool and all tiers, then a load for each block that the pool
// lacks.
#include "tier/chain/promotion.hpp"

#include <algorithm>

#include "cache/prefix/longest_match.hpp"
#include "tier/host_tier.hpp"
#include "tier/store/remote_tier.hpp"

namespace kvx::tier {
namespace {

using cache::BlockKind;
using cache::kNoBlock;
using cache::kNoNode;

// The nodes of the tokens in one index: kNoNode from where it has none.
struct Walk {
  cache::PrefixIndex* index = nullptr;
  std::vector<int32_t> nodes;  // [blocks]

  int32_t block_of(int64_t block, int group, BlockKind kind) const {
    const int32_t node = nodes[block];
    return node == kNoNode ? kNoBlock : index->block_of(node, group, kind);
  }
};

class Planner {
 public:
  Planner(const FirstTier& first, int32_t first_scope, std::span<const TierScope> tiers,
          std::span<const int32_t> tokens, int64_t max_blocks, std::span<const StoreAnswer> answers,
          LoadOrder order = LoadOrder::kWholeBlocks)
      : first_(first),
        first_scope_(first_scope),
        tiers_(tiers),
        answers_(answers),
        tokens_(tokens),
        is_by_layer_(order == LoadOrder::kLayerByLayer && first.parts != nullptr) {
    walks_.push_back({first.index, {}});
    for (const TierScope& one : tiers) {
      walks_.push_back({&one.tier->nodes(), {}});
      promotion_.under_way.push_back({one.tier, std::make_shared<TransferGroup>()});
    }
    for (const StoreAnswer& one : answers) {
      promotion_.from_stores.push_back({one.tier, std::make_shared<TransferGroup>(),
                                        std::chrono::steady_clock::now() + one.tier->timeout()});
    }
    walk(std::min(static_cast<int64_t>(tokens.size()) / first.shape->block_size, max_blocks));
  }

  Promotion promote() {
    match();
    count_match();
    int32_t node = first_scope_;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      // Past the pool's own nodes all that is there is held.
      const bool is_new = walks_[0].nodes[block] == kNoNode;
      if (is_new && first_.index->is_full() && !make_room_for_node()) break;
      node = insert(node, block);
      first_.index->pin(node);
      promotion_.pinned.push_back(node);
      want_block(block, node);
    }
    start_missing();  // what is there is held by now, so that making room does not evict it
    start_layers();
    return std::move(promotion_);
  }

  // Null: pool and tiers serve all that is wanted.
  std::shared_ptr<StoreLookup> make_lookup(const StoreScope& scope,
                                           cache::HashAlgorithm algorithm) {
    match();
    if (num_blocks_ == num_wanted_) return nullptr;
    const auto num_groups = static_cast<int>(groups_.size());
    auto lookup = std::make_shared<StoreLookup>(num_wanted_, num_groups);
    cache::ContentHash parent = first_.index->hash(first_scope_);
    for (int64_t block = 0; block < num_wanted_; ++block) {
      const std::span<const int32_t> tokens = tokens_of(block);
      const cache::ContentHash hash = cache::hash_block(algorithm, parent, tokens);
      for (int group = 0; group < num_groups; ++group) {
        for (const BlockKind kind : {BlockKind::kPacked, BlockKind::kFullPrecision}) {
          if (kind == BlockKind::kFullPrecision &&
              !first_.shape->groups[group].full_precision_window.is_on()) {
            continue;
          }
          if (tiers_have(block, group, kind)) continue;
          lookup->ask(block, {scope, parent, hash, {tokens.begin(), tokens.end()}, group, kind});
        }
      }
      parent = hash;
    }
    return lookup->is_empty() ? nullptr : lookup;
  }

 private:
  // A load that waits until all blocks that are there are held.
  struct Missing {
    size_t source = 0;  // a tier's place, or behind them a store's
    int64_t block = 0;
    TierLoad load;
    bool is_by_layer = false;
  };
  // A block comes layer by layer and has its place in the pool: this is where it comes from.
  struct LayeredLoad {
    HostTier* tier = nullptr;
    size_t source = 0;
    TierLoad load;
    std::shared_ptr<BlockInParts> block;
  };

  // The pool's node of a block: whose it is where the nearest tier has it, if it is new here.
  int32_t insert(int32_t parent, int64_t block) {
    for (const Walk& one : walks_) {
      if (one.nodes[block] == kNoNode) continue;
      return first_.index->insert_copy(parent, *one.index, one.nodes[block]);
    }
    return first_.index->insert(parent, tokens_of(block));
  }
  std::span<const int32_t> tokens_of(int64_t block) const {
    const auto block_size = static_cast<size_t>(first_.shape->block_size);
    return tokens_.subspan(static_cast<size_t>(block) * block_size, block_size);
  }

  // Down all indexes at once, until none has a node.
  void walk(int64_t num_wanted) {
    std::vector<int32_t> ends{first_scope_};
    for (const TierScope& one : tiers_) ends.push_back(one.scope);
    for (num_blocks_ = 0; num_blocks_ < num_wanted; ++num_blocks_) {
      bool is_found = false;
      for (size_t i = 0; i < walks_.size(); ++i) {
        if (ends[i] != kNoNode)
          ends[i] = walks_[i].index->find_child(ends[i], tokens_of(num_blocks_));
        is_found = is_found || ends[i] != kNoNode;
        walks_[i].nodes.push_back(ends[i]);
      }
      if (!is_found && !stores_have(num_blocks_)) break;
    }
    num_wanted_ = num_wanted;
  }

  bool tiers_have(int64_t block, int group, BlockKind kind) const {
    return std::ranges::any_of(walks_, [&](const Walk& one) {
      return block < std::ssize(one.nodes) && one.block_of(block, group, kind) != kNoBlock;
    });
  }
  bool stores_have(int64_t block, int group, BlockKind kind) const {
    return std::ranges::any_of(answers_, [&](const StoreAnswer& one) {
      return block < one.lookup->num_blocks() && one.lookup->find(block, group, kind) != nullptr;
    });
  }
  // Anything of the block.
  bool stores_have(int64_t block) const {
    for (int group = 0; group < static_cast<int>(first_.shape->groups.size()); ++group) {
      if (stores_have(block, group, BlockKind::kPacked) ||
          stores_have(block, group, BlockKind::kFullPrecision)) {
        return true;
      }
    }
    return false;
  }

  void match() {
    const auto has = [this](int64_t block, int group, BlockKind kind) {
      return tiers_have(block, group, kind) || stores_have(block, group, kind);
    };
    groups_.resize(first_.shape->groups.size());
    std::vector<uint8_t> fits;
    num_blocks_ = cache::longest_match(*first_.shape, num_blocks_, has, fits, groups_);
  }

  void count_match() {
    for (size_t i = 0; i < tiers_.size(); ++i) {
      const auto& nodes = walks_[i + 1].nodes;
      const auto num_here = std::count_if(nodes.begin(), nodes.begin() + num_blocks_,
                                          [](int32_t node) { return node != kNoNode; });
      walks_[i + 1].index->count_match(num_here, num_wanted_ - num_here);
    }
  }

  int class_of(int group, BlockKind kind) const {
    const cache::LayerGroup& facts = first_.shape->groups[group];
    return kind == BlockKind::kFullPrecision ? facts.full_precision_class : facts.packed_class;
  }

  // What a match of the pool will read of this block: held where it is there; else on its way at
  // once while blocks are free, so that copies begin before all is looked up; else missing.
  void want_block(int64_t block, int32_t node) {
    for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
      const cache::LayerGroup& facts = first_.shape->groups[group];
      const cache::FullPrecisionWindow& in_full = facts.full_precision_window;
      const cache::GroupMatch& found = groups_[group];
      const bool is_sink = block < facts.window_sink_blocks;
      if (block < found.first_block && !is_sink) continue;  // a window has passed it
      const bool is_full_precision =
          in_full.is_on() && (block < in_full.sink_blocks || block >= found.first_recent_block);
      const BlockKind kind = is_full_precision ? BlockKind::kFullPrecision : BlockKind::kPacked;
      TierLoad load{group, kind, class_of(group, kind), node, kNoBlock, kNoBlock};
      load.first_id = first_.index->block_of(node, group, kind);
      if (load.first_id == kNoBlock) {
        const bool is_recent = is_full_precision && block >= in_full.sink_blocks;
        load_from_nearest(block, load, is_by_layer_ && !is_recent);
      } else if (first_.pool->retain(load.block_class, load.first_id).ok()) {
        promotion_.held.emplace_back(load.block_class, load.first_id);
      }
    }
  }

  void load_from_nearest(int64_t block, TierLoad load, bool is_by_layer) {
    for (size_t i = 0; i < tiers_.size(); ++i) {
      load.from_id = walks_[i + 1].block_of(block, load.group, load.kind);
      if (load.from_id != kNoBlock) return start_or_miss({i, block, load, is_by_layer});
    }
    for (size_t i = 0; i < answers_.size(); ++i) {
      if (block >= answers_[i].lookup->num_blocks()) continue;
      if (answers_[i].lookup->find(block, load.group, load.kind) == nullptr) continue;
      return start_or_miss({tiers_.size() + i, block, load});
    }
  }

  void start_or_miss(const Missing& one) {
    const bool can_start = missing_.empty() && first_.pool->num_free(one.load.block_class) > 0;
    if (!can_start || !start_load(one)) missing_.push_back(one);
  }

  // False when the pool has no room for all of them.
  bool start_missing() {
    for (const Missing& one : missing_) {
      if (start_load(one)) continue;
      promotion_.ran_short = true;
      break;
    }
    missing_.clear();
    return !promotion_.ran_short;
  }

  // Nodes of other prompts go with their blocks: those that loads take, then as many more as hold a
  // node. False when none goes.
  bool make_room_for_node() {
    if (!start_missing()) return false;
    bool has_evicted = true;
    while (first_.index->is_full() && has_evicted) {
      has_evicted = false;
      for (int c = 0; c < first_.pool->num_classes() && first_.index->is_full(); ++c) {
        has_evicted = first_.pool->evict(c, 1) > 0 || has_evicted;
      }
    }
    promotion_.ran_short = first_.index->is_full();
    return !promotion_.ran_short;
  }

  // False when the pool has no room.
  bool start_load(const Missing& one) {
    TierLoad load = one.load;
    if (!first_.pool->allocate(load.block_class, std::span(&load.first_id, 1)).ok()) return false;
    promotion_.held.emplace_back(load.block_class, load.first_id);
    ++promotion_.num_loads;
    if (one.is_by_layer) {
      promotion_.coming.add(load.node, load.group, load.kind, load.first_id);
      layered_.push_back({tiers_[one.source].tier, one.source, load,
                          std::make_shared<BlockInParts>(BlockInParts{promotion_.problem})});
      return true;
    }
    if (one.source < tiers_.size()) {
      tiers_[one.source].tier->start_load(load, promotion_.under_way[one.source].group);
      return true;
    }
    const size_t store = one.source - tiers_.size();
    answers_[store].tier->start_load(
        load, *answers_[store].lookup->find(one.block, load.group, load.kind),
        promotion_.from_stores[store].group, promotion_.from_stores[store].end);
    return true;
  }

  // The first layer of all blocks, then the second one.
  void start_layers() {
    if (layered_.empty()) return;
    for (const TierScope& one : tiers_) promotion_.layers.push_back({one.tier, {}});
    for (const BlockParts::LayerPlace& place : first_.parts->layers) {
      for (Promotion::Layers& one : promotion_.layers) {
        one.groups.push_back(std::make_shared<TransferGroup>());
      }
      for (const LayeredLoad& one : layered_) {
        if (place.part < 0 || one.load.group != place.group) continue;
        one.tier->start_part(one.load, place.part, one.block,
                             promotion_.layers[one.source].groups.back());
      }
    }
  }

  const FirstTier& first_;
  int32_t first_scope_;
  std::span<const TierScope> tiers_;
  std::span<const StoreAnswer> answers_;
  std::span<const int32_t> tokens_;
  std::vector<Walk> walks_;  // of the pool's index, then of each tier's
  int64_t num_wanted_ = 0;
  int64_t num_blocks_ = 0;
  std::vector<cache::GroupMatch> groups_;
  std::vector<Missing> missing_;
  bool is_by_layer_;
  std::vector<LayeredLoad> layered_;
  Promotion promotion_;
};

}  // namespace

Promotion promote(const FirstTier& first, int32_t first_scope, std::span<const TierScope> tiers,
                  std::span<const int32_t> tokens, int64_t max_blocks,
                  std::span<const StoreAnswer> answers, LoadOrder order) {
  return Planner(first, first_scope, tiers, tokens, max_blocks, answers, order).promote();
}

std::shared_ptr<StoreLookup> make_lookup(const FirstTier& first, int32_t first_scope,
                                         std::span<const TierScope> tiers,
                                         std::span<const int32_t> tokens, int64_t max_blocks,
                                         const StoreScope& scope, cache::HashAlgorithm algorithm) {
  return Planner(first, first_scope, tiers, tokens, max_blocks, {}).make_lookup(scope, algorithm);
}

void release_promotion(const FirstTier& first, Promotion& promotion) {
  // The chain's end first, as sequences do.
  std::reverse(promotion.held.begin(), promotion.held.end());
  for (const auto& [block_class, id] : promotion.held) (void)first.pool->release(block_class, id);
  std::reverse(promotion.pinned.begin(), promotion.pinned.end());
  for (int32_t node : promotion.pinned) first.index->unpin(node);
  promotion = {};
}

bool is_done(const Promotion& promotion) {
  const auto now = std::chrono::steady_clock::now();
  return std::ranges::all_of(promotion.under_way,
                             [](const auto& one) { return one.tier->is_done(*one.group); }) &&
         std::ranges::all_of(promotion.from_stores, [now](const auto& one) {
           return now >= one.end || one.tier->is_done(*one.group);
         });
}

void wait(const Promotion& promotion) {
  for (const Promotion::UnderWay& one : promotion.under_way) one.tier->wait(*one.group);
  for (const Promotion::FromStore& one : promotion.from_stores) {
    one.tier->wait_until(*one.group, one.end);
  }
}

void wait_for_some(const Promotion& promotion) {
  for (const Promotion::UnderWay& one : promotion.under_way) {
    if (one.tier->is_done(*one.group)) continue;
    return one.tier->wait_for_some();
  }
  for (const Promotion::FromStore& one : promotion.from_stores) {
    one.tier->wait_until(*one.group, one.end);
  }
}

bool is_layer_there(const Promotion& promotion, int layer) {
  return std::ranges::all_of(promotion.layers, [layer](const auto& one) {
    const auto last = one.groups.begin() + std::min<int64_t>(layer + 1, std::ssize(one.groups));
    return std::all_of(one.groups.begin(), last,
                       [&one](const auto& group) { return one.tier->is_done(*group); });
  });
}

void wait_for_layer(const Promotion& promotion, int layer) {
  for (const Promotion::Layers& one : promotion.layers) {
    const auto last = one.groups.begin() + std::min<int64_t>(layer + 1, std::ssize(one.groups));
    std::for_each(one.groups.begin(), last, [&one](const auto& group) { one.tier->wait(*group); });
  }
}

}  // namespace kvx::tier
