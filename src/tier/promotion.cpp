// Promotions: one match over the pool and all tiers, then a load for each block that the pool
// lacks.
#include "tier/promotion.hpp"

#include <algorithm>

#include "cache/prefix/longest_match.hpp"
#include "tier/host_tier.hpp"

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
          std::span<const int32_t> tokens, int64_t max_blocks)
      : first_(first), first_scope_(first_scope), tiers_(tiers), tokens_(tokens) {
    walks_.push_back({first.index, {}});
    for (const TierScope& one : tiers) {
      walks_.push_back({&one.tier->nodes(), {}});
      promotion_.under_way.push_back({one.tier, std::make_shared<TransferGroup>()});
    }
    walk(std::min(static_cast<int64_t>(tokens.size()) / first.shape->block_size, max_blocks));
  }

  Promotion promote() {
    match();
    int32_t node = first_scope_;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      node = first_.index->insert(node, tokens_of(block));
      if (node == kNoNode) break;  // no room in the first tier's index, which counts it
      first_.index->pin(node);
      promotion_.pinned.push_back(node);
      want_block(block, node);
    }
    // What is there is held by now, so that making room does not evict it.
    for (const auto& [tier, load] : missing_) {
      if (start_load(tier, load)) continue;
      promotion_.ran_short = true;
      break;
    }
    return std::move(promotion_);
  }

 private:
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
      if (!is_found) break;
    }
    num_wanted_ = num_wanted;
  }

  void match() {
    const auto has = [this](int64_t block, int group, BlockKind kind) {
      return std::ranges::any_of(
          walks_, [&](const Walk& one) { return one.block_of(block, group, kind) != kNoBlock; });
    };
    groups_.resize(first_.shape->groups.size());
    std::vector<uint8_t> fits;
    num_blocks_ = cache::longest_match(*first_.shape, num_blocks_, has, fits, groups_);
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
        load_from_nearest(block, load);
      } else if (first_.pool->retain(load.block_class, load.first_id).ok()) {
        promotion_.held.emplace_back(load.block_class, load.first_id);
      }
    }
  }

  void load_from_nearest(int64_t block, TierLoad load) {
    for (size_t i = 0; i < tiers_.size(); ++i) {
      load.from_id = walks_[i + 1].block_of(block, load.group, load.kind);
      if (load.from_id == kNoBlock) continue;
      const bool can_start = missing_.empty() && first_.pool->num_free(load.block_class) > 0;
      if (!can_start || !start_load(i, load)) missing_.emplace_back(i, load);
      return;
    }
  }

  // False when the pool has no room.
  bool start_load(size_t tier, TierLoad load) {
    if (!first_.pool->allocate(load.block_class, std::span(&load.first_id, 1)).ok()) return false;
    promotion_.held.emplace_back(load.block_class, load.first_id);
    tiers_[tier].tier->start_load(load, promotion_.under_way[tier].group);
    ++promotion_.num_loads;
    return true;
  }

  const FirstTier& first_;
  int32_t first_scope_;
  std::span<const TierScope> tiers_;
  std::span<const int32_t> tokens_;
  std::vector<Walk> walks_;  // of the pool's index, then of each tier's
  int64_t num_wanted_ = 0;
  int64_t num_blocks_ = 0;
  std::vector<cache::GroupMatch> groups_;
  std::vector<std::pair<size_t, TierLoad>> missing_;  // with the tier's place
  Promotion promotion_;
};

}  // namespace

Promotion promote(const FirstTier& first, int32_t first_scope, std::span<const TierScope> tiers,
                  std::span<const int32_t> tokens, int64_t max_blocks) {
  return Planner(first, first_scope, tiers, tokens, max_blocks).promote();
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
  return std::ranges::all_of(promotion.under_way, [](const Promotion::UnderWay& one) {
    return one.tier->is_done(*one.group);
  });
}

void wait(const Promotion& promotion) {
  for (const Promotion::UnderWay& one : promotion.under_way) one.tier->wait(*one.group);
}

void wait_for_some(const Promotion& promotion) {
  for (const Promotion::UnderWay& one : promotion.under_way) {
    if (one.tier->is_done(*one.group)) continue;
    return one.tier->wait_for_some();
  }
}

}  // namespace kvx::tier
