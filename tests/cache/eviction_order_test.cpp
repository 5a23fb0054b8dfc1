// EvictionOrder and the index together: chains go from their ends, under every policy.
#include "cache/prefix/eviction_order.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <vector>

#include "cache/prefix/prefix_index.hpp"
#include "tests/cache/random_history.hpp"

namespace kvx::cache::eviction_order_test {
namespace {

constexpr EvictionKind kKinds[] = {EvictionKind::kLru, EvictionKind::kLfu, EvictionKind::k2Q};

TEST(EvictionOrder, AHeldBlockGoesAfterThoseThatStandOnIt) {
  for (EvictionKind kind : kKinds) {
    EvictionOrder order(kind, 3);
    for (int32_t id = 0; id < 3; ++id) order.insert(id, static_cast<uint32_t>(id));
    order.hold(0);
    EXPECT_EQ(order.evict(), 1) << name_of(kind);
    order.unhold(0);
    EXPECT_EQ(order.evict(), 0) << name_of(kind) << ": it has waited";
    EXPECT_EQ(order.evict(), 2) << name_of(kind);
  }
}

TEST(EvictionOrder, WhenAllAreHeldTheOneThatWaitedLongestGoes) {
  for (EvictionKind kind : kKinds) {
    EvictionOrder order(kind, 2);
    for (int32_t id : {1, 0}) order.insert(id, static_cast<uint32_t>(id));
    for (int32_t id : {0, 1}) order.hold(id);
    EXPECT_EQ(order.evict(), 1) << name_of(kind);
    EXPECT_EQ(order.evict(), 0) << name_of(kind);
  }
}

TEST(EvictionOrder, ABlockThatWaitsMayBeRemovedAndInsertedAgain) {
  for (EvictionKind kind : kKinds) {
    EvictionOrder order(kind, 2);
    for (int32_t id : {0, 1}) order.insert(id, static_cast<uint32_t>(id));
    order.hold(0);
    EXPECT_EQ(order.evict(), 1);
    order.forget(1);
    order.insert(1, 7);  // other content
    order.remove(0);
    order.insert(0, 0);
    order.unhold(0);
    EXPECT_EQ(order.evict(), 1) << name_of(kind) << ": 0 was let go of later";
    EXPECT_EQ(order.evict(), 0) << name_of(kind);
  }
}

// Blocks are a forest in which a parent has the lower number; a block is held while a child of it
// is there. Whatever is evicted, no child of it is left.
RC_GTEST_PROP(EvictionOrder, NeverLeavesAChildWithoutItsParent, ()) {
  constexpr int32_t kNumBlocks = 16;
  const auto kind =
      *rc::gen::elementOf(std::vector<EvictionKind>(std::begin(kKinds), std::end(kKinds)));
  EvictionOrder order(kind, kNumBlocks);
  std::vector<bool> is_there(kNumBlocks, true);
  std::vector<int> num_children(kNumBlocks);
  std::vector<int32_t> parents(kNumBlocks, -1);
  for (int32_t id = 1; id < kNumBlocks; ++id) {
    parents[id] = *rc::gen::inRange(-1, id);
    if (parents[id] >= 0 && ++num_children[parents[id]] == 1) order.hold(parents[id]);
  }
  for (int32_t id = 0; id < kNumBlocks; ++id) order.insert(id, static_cast<uint32_t>(id));
  const auto touches = *rc::gen::container<std::vector<int32_t>>(rc::gen::inRange(0, kNumBlocks));
  size_t next_touch = 0;
  for (int32_t left = kNumBlocks; left > 0; --left) {
    for (int i = 0; i < 2 && next_touch < touches.size(); ++i, ++next_touch) {
      if (is_there[touches[next_touch]]) order.touch(touches[next_touch]);
    }
    const int32_t id = order.evict();
    RC_ASSERT(is_there[id]);
    RC_ASSERT(num_children[id] == 0);
    is_there[id] = false;
    order.forget(id);
    const int32_t parent = parents[id];
    if (parent >= 0 && --num_children[parent] == 0) order.unhold(parent);
  }
}

// ---- the index says what stands on what

struct CachedChains : EvictionListener {
  SequenceShape shape{1, 64, {{0, 0, {}, 0}}};
  BlockPool pool;
  PrefixIndex index;
  int32_t scope;

  CachedChains(int64_t num_blocks, EvictionKind kind)
      : pool(make_pool(num_blocks, kind)),
        index(PrefixIndex::create(pool, shape, "", HashAlgorithm::kXxh3).value()),
        scope(index.pin_scope({}).value()) {
    pool.set_eviction_listener(this);
  }
  static BlockPool make_pool(int64_t num_blocks, EvictionKind kind) {
    const BlockClassSpec spec{"blocks", num_blocks, {1}};
    return BlockPool::create(host_memory(), std::span(&spec, 1), {kind, false}).value();
  }
  void on_evict(int block_class, int32_t id) override { index.on_evict(block_class, id); }

  // A sequence of these tokens begins with what is cached and leaves all of itself cached.
  void run(const std::vector<int32_t>& tokens) {
    Sequence sequence = Sequence::create(shape).value();
    const PrefixMatch match = index.match(scope, tokens, 64);
    std::vector<int32_t> ids;
    for (int32_t node : match.nodes) ids.push_back(index.block_of(node, 0, BlockKind::kPacked));
    int32_t node = match.nodes.empty() ? scope : match.nodes.back();
    const auto num_hits = match.num_blocks();
    const GroupPrefix prefix{ids, 0, num_hits};
    ASSERT_TRUE(sequence.adopt(pool, num_hits, std::span(&prefix, 1)).ok());
    for (int32_t id : ids) ASSERT_TRUE(pool.touch(0, id).ok());
    const auto num_new = static_cast<int64_t>(tokens.size()) - num_hits;
    if (num_new > 0) {
      ASSERT_TRUE(sequence.append(pool, num_new).ok());
    }
    for (auto i = static_cast<size_t>(num_hits); i < tokens.size(); ++i) {
      node = index.insert(node, std::span(tokens).subspan(i, 1));
      ASSERT_NE(node, kNoNode);
      ASSERT_TRUE(index.attach(node, 0, BlockKind::kPacked, sequence.table(0)[i]).ok());
    }
    ASSERT_TRUE(sequence.clear(pool).ok());
  }

  void expect_all_reachable() {
    index.for_each_node([this](int32_t node) {
      EXPECT_NE(index.block_of(node, 0, BlockKind::kPacked), kNoBlock);
      const int32_t parent = index.parent(node);
      if (index.is_scope(parent)) return;
      EXPECT_NE(index.block_of(parent, 0, BlockKind::kPacked), kNoBlock) << "a lost parent";
    });
  }
};

TEST(EvictionOrder, LeavesNoCachedBlockThatCannotBeFound) {
  for (EvictionKind kind : kKinds) {
    SCOPED_TRACE(name_of(kind));
    CachedChains chains(40, kind);
    RandomHistory random(1);
    for (int i = 0; i < 3000; ++i) {
      std::vector<int32_t> tokens;
      const int64_t length = random.between(1, 20);
      while (static_cast<int64_t>(tokens.size()) < length) {
        tokens.push_back(static_cast<int32_t>(random.between(0, 1)));
      }
      chains.run(tokens);
      chains.expect_all_reachable();
      if (testing::Test::HasFailure()) FAIL() << "run " << i;
    }
    EXPECT_GT(chains.pool.snapshot(0).num_evicted, 1000);
    EXPECT_EQ(chains.index.counters().num_refused, 0);
  }
}

}  // namespace
}  // namespace kvx::cache::eviction_order_test
