// RetainedBlocks and the eviction order with it: priorities, pins and deadlines.
#include "cache/prefix/retained_blocks.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>

#include "cache/pool/block_pool.hpp"
#include "cache/prefix/eviction_order.hpp"

namespace kvx::cache::retained_blocks_test {
namespace {

int64_t test_clock_ms = 0;
int64_t test_now() {
  return test_clock_ms;
}

constexpr EvictionKind kKinds[] = {EvictionKind::kLru, EvictionKind::kLfu, EvictionKind::k2Q,
                                   EvictionKind::kAgents};

void insert_all(EvictionOrder& order, int32_t count) {
  for (int32_t id = 0; id < count; ++id) order.insert(id, static_cast<uint32_t>(id));
}

TEST(RetainedBlocks, GoByPriorityAroundThePolicys) {
  for (const EvictionKind kind : kKinds) {
    EvictionOrder order(kind, 6);
    order.set_retention(0, 0, {80});
    order.set_retention(1, 1, {100});
    insert_all(order, 6);
    order.set_retention(4, 4, {0});  // also of a block that nobody uses
    order.set_retention(5, 5, {34});
    std::vector<int32_t> ids;
    for (int i = 0; i < 6; ++i) ids.push_back(order.evict());
    EXPECT_EQ(ids, (std::vector<int32_t>{4, 5, 2, 3, 0, 1})) << name_of(kind);
  }
}

TEST(RetainedBlocks, OfOnePriorityTheOneReleasedFirstGoes) {
  EvictionOrder order(EvictionKind::kLru, 3);
  for (int32_t id : {0, 1, 2}) order.set_retention(id, 0, {50});
  for (int32_t id : {2, 0, 1}) order.insert(id, 0);
  order.touch(2);
  EXPECT_EQ(order.evict(), 0);
  EXPECT_EQ(order.evict(), 1);
  EXPECT_EQ(order.evict(), 2);
}

TEST(RetainedBlocks, WaitForThoseThatStandOnThem) {
  for (const EvictionKind kind : kKinds) {
    EvictionOrder order(kind, 3);
    order.set_retention(0, 0, {0});
    insert_all(order, 3);
    order.hold(0);
    EXPECT_EQ(order.evict(), 1);
    order.set_retention(0, 0, {60});  // while it waits
    order.unhold(0);
    EXPECT_EQ(order.evict(), 2) << name_of(kind);
    EXPECT_EQ(order.evict(), 0) << name_of(kind);
  }
}

TEST(RetainedBlocks, AreThePolicysAgainWhenTheirTimeIsOver) {
  test_clock_ms = 5000;
  EvictionOrder order(EvictionKind::kLru, 4, test_now);
  order.set_retention(0, 0, {90, false, 5000 + 1000});
  order.set_retention(1, 1, {90, false, 5000 + 500'000});  // several turns of the wheel
  order.set_retention(2, 2, {0, false, 5000 + 1000});
  insert_all(order, 4);
  test_clock_ms = 6000;
  order.expire();
  EXPECT_TRUE(order.retention(0).is_default());
  EXPECT_EQ(order.evict(), 3) << "0 and 2 came to the policy later";
  order.insert(3, 3);
  test_clock_ms = 504'999;
  order.expire();
  EXPECT_EQ(order.retention(1).priority, 90);
  test_clock_ms = 505'000;
  order.expire();
  EXPECT_TRUE(order.retention(1).is_default());
}

BlockPool small_pool(int64_t num_blocks) {
  const BlockClassSpec spec{"test", num_blocks, {8}};
  BlockPoolOptions options;
  options.now_ms = test_now;
  return BlockPool::create(host_memory(), {&spec, 1}, options).value();
}

std::vector<int32_t> cached_blocks(BlockPool& pool, int32_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  EXPECT_TRUE(pool.allocate(0, ids).ok());
  for (int32_t id : ids) {
    EXPECT_TRUE(pool.keep(0, id, static_cast<uint32_t>(id)).ok());
    EXPECT_TRUE(pool.release(0, id).ok());
  }
  return ids;
}

TEST(RetainedBlocks, APinnedBlockIsNoRoomUntilItsPinIsOver) {
  test_clock_ms = 0;
  BlockPool pool = small_pool(4);
  const std::vector<int32_t> ids = cached_blocks(pool, 4);
  ASSERT_TRUE(pool.set_retention(0, ids[0], {0, true, kForever}).ok());
  ASSERT_TRUE(pool.set_retention(0, ids[1], {0, true, 2000}).ok());
  const Status third = pool.set_retention(0, ids[2], {0, true, kForever});
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(pool.num_available(0), 2);
  EXPECT_EQ(pool.snapshot(0).num_pinned, 2);
  int32_t taken[3];
  EXPECT_FALSE(pool.allocate(0, taken).ok());
  EXPECT_EQ(pool.evict(0, 4), 2);
  test_clock_ms = 2000;
  ASSERT_TRUE(pool.allocate(0, taken).ok());
  EXPECT_EQ(pool.snapshot(0).num_pinned, 1);
  EXPECT_EQ(pool.num_available(0), 0);
  ASSERT_TRUE(pool.set_retention(0, ids[0], {}).ok());
  EXPECT_EQ(pool.num_available(0), 1);
}

TEST(RetainedBlocks, ARetentionGoesWithTheContent) {
  BlockPool pool = small_pool(1);
  const int32_t id = cached_blocks(pool, 1)[0];
  ASSERT_TRUE(pool.set_retention(0, id, {90}).ok());
  int32_t taken;
  ASSERT_TRUE(pool.allocate(0, {&taken, 1}).ok());
  EXPECT_TRUE(pool.retention(0, taken).is_default());
  ASSERT_TRUE(pool.release(0, taken).ok());
  EXPECT_FALSE(pool.set_retention(0, taken, {90}).ok()) << "it is free";
  EXPECT_FALSE(pool.set_retention(0, 7, {90}).ok());
}

// Random calls against a map: what is evicted has the lowest priority of all that may go.
RC_GTEST_PROP(RetainedBlocks, EvictTheLowestThatMayGo, ()) {
  constexpr int32_t kNumBlocks = 12;
  test_clock_ms = 0;
  EvictionOrder order(
      *rc::gen::elementOf(std::vector<EvictionKind>(std::begin(kKinds), std::end(kKinds))),
      kNumBlocks, test_now);
  std::map<int32_t, Retention> wanted;
  std::vector<bool> is_in(kNumBlocks, false);
  const auto now_of = [&](int32_t id) {
    const auto found = wanted.find(id);
    return found == wanted.end() || found->second.until_ms <= test_clock_ms ? Retention{}
                                                                            : found->second;
  };
  const int num_calls = *rc::gen::inRange(0, 200);
  for (int call = 0; call < num_calls; ++call) {
    const int32_t id = *rc::gen::inRange(0, kNumBlocks);
    test_clock_ms += *rc::gen::inRange(0, 3) * 70;
    const int what = *rc::gen::inRange(0, 4);
    if (what == 0) {
      const int priority = *rc::gen::elementOf(std::vector<int>{0, 34, 35, 36, 63, 64, 100});
      const bool is_pinned = *rc::gen::inRange(0, 5) == 0;
      const bool ends = *rc::gen::inRange(0, 2) == 0;
      wanted[id] = {priority, is_pinned,
                    ends ? test_clock_ms + *rc::gen::inRange(1, 2000) : kForever};
      order.set_retention(id, static_cast<uint32_t>(id), wanted[id]);
    } else if (what == 1 && !is_in[id]) {
      order.insert(id, static_cast<uint32_t>(id));
      is_in[id] = true;
    } else if (what == 2 && is_in[id]) {
      order.remove(id);
      is_in[id] = false;
    } else if (what == 3) {
      int least = kMostPriority + 1;
      for (int32_t other = 0; other < kNumBlocks; ++other) {
        if (is_in[other] && !now_of(other).is_pinned) {
          least = std::min(least, now_of(other).priority);
        }
      }
      if (least > kMostPriority) continue;
      const int32_t evicted = order.evict();
      RC_ASSERT(is_in[evicted]);
      RC_ASSERT(!now_of(evicted).is_pinned);
      RC_ASSERT(now_of(evicted).priority == least);
      is_in[evicted] = false;
      order.forget(evicted);
      wanted.erase(evicted);
    }
  }
  order.expire();
  int num_pinned = 0;
  for (int32_t id = 0; id < kNumBlocks; ++id) num_pinned += now_of(id).is_pinned;
  RC_ASSERT(order.num_pinned() == num_pinned);
}

}  // namespace
}  // namespace kvx::cache::retained_blocks_test
