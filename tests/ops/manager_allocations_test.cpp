// Once a cache is warm, steps, records, forks' copies, moves and evictions allocate nothing that
// the manager needs. (In this folder because its binary counts allocations.)
#include <gtest/gtest.h>

#include "cache/prefix/prefix_index.hpp"
#include "tests/support/allocation_counter.hpp"

namespace kvx::cache {
namespace {

using tests::num_allocations;

TEST(Manager, AllocatesNothingOnTheWayOfAnAppend) {
  const SequenceShape shape{4, 400, {{0, 1, {1, 2}, 0}}};
  std::vector<BlockClassSpec> classes = {{"packed", 30, {16}}, {"full_precision", 12, {16}}};
  for (EvictionKind kind : {EvictionKind::kLru, EvictionKind::kLfu, EvictionKind::k2Q}) {
    BlockPool pool = BlockPool::create(host_memory(), classes, {kind, false}).value();
    PrefixIndex index = PrefixIndex::create(pool, shape, "", HashAlgorithm::kXxh3).value();
    struct Listener : EvictionListener {
      PrefixIndex* index;
      void on_evict(int block_class, int32_t id) override { index->on_evict(block_class, id); }
    } listener;
    listener.index = &index;
    pool.set_eviction_listener(&listener);
    Sequence sequence = Sequence::create(shape).value();
    SequenceGrowth growth;
    ASSERT_TRUE(sequence.acquire(pool, 4, growth).ok());  // the most that a growth below needs
    growth.moves.reserve(1);
    growth.groups[0].ids.reserve(4);
    growth.groups[0].packed_ids.reserve(1);
    growth.copies.reserve(1);
    ASSERT_TRUE(sequence.cancel(pool, growth).ok());
    int32_t tip = index.pin_scope({}).value();

    const int64_t before = num_allocations();
    for (int32_t token = 0; token < 100; ++token) {
      ASSERT_TRUE(sequence.acquire(pool, 1, growth).ok());
      ASSERT_TRUE(sequence.commit_moves(pool, growth).ok());
      ASSERT_TRUE(sequence.commit(pool, growth).ok());
      if (sequence.num_tokens() % 4 != 0) continue;
      const int32_t tokens[] = {token, token, token, token};
      const int32_t node = index.insert(tip, tokens);
      ASSERT_NE(node, kNoNode);
      index.pin(node);
      index.unpin(tip);
      tip = node;
      const int64_t block = sequence.num_tokens() / 4 - 1;
      ASSERT_TRUE(index.attach(node, 0, BlockKind::kFullPrecision, sequence.table(0)[block]).ok());
    }
    EXPECT_EQ(num_allocations() - before, 0) << name_of(kind);
    EXPECT_GT(pool.snapshot(1).num_evicted, 0);
    ASSERT_TRUE(sequence.clear(pool).ok());
  }
}

}  // namespace
}  // namespace kvx::cache
