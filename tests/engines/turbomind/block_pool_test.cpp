// TurboMind's pools: a block and its scales are one, and the pointer tables lead to both.
#include <gtest/gtest.h>

#include <numeric>

#include "engines/turbomind/block_pool.hpp"
#include "ops/append/append.hpp"
#include "tests/engines/turbomind_pool.hpp"

namespace kvx::engines::turbomind::turbomind_block_pool_test {
namespace {

PoolLayout layout_of(KvCacheMode mode) {
  return make_pool_layout({mode, DType::kF16, 2, 3, 32, 16}).value();
}

DataAndScalePool pool_of(KvCacheMode mode, int64_t num_blocks = 8) {
  return DataAndScalePool::create(cache::host_memory(), layout_of(mode), num_blocks).value();
}

TEST(TurbomindPool, TakesDataAndScalesTogether) {
  DataAndScalePool pool = pool_of(KvCacheMode::kFp4Mx);
  std::vector<int32_t> data(5);
  std::vector<int32_t> scales(5);
  ASSERT_TRUE(pool.allocate_data_and_scale_blocks(5, data, scales).ok());
  EXPECT_EQ(data, scales);
  EXPECT_EQ(pool.blocks().num_used(0), 5);
  EXPECT_FALSE(pool.allocate_data_and_scale_blocks(4, data, scales).ok()) << "3 are left";
  EXPECT_EQ(pool.blocks().num_used(0), 5);
  ASSERT_TRUE(pool.free_data_and_scale_blocks(data, scales).ok());
  EXPECT_EQ(pool.blocks().num_used(0), 0);
}

TEST(TurbomindPool, FreesAllOrNothing) {
  DataAndScalePool pool = pool_of(KvCacheMode::kFp4Nv);
  std::vector<int32_t> ids(2);
  std::vector<int32_t> scales(2);
  ASSERT_TRUE(pool.allocate_data_and_scale_blocks(2, ids, scales).ok());
  const std::vector<std::vector<int32_t>> refused = {
      {ids[0], ids[0]}, {ids[0], 99}, {ids[0], -1}, {ids[0], 7 - ids[1]}};
  for (const std::vector<int32_t>& wrong : refused) {
    EXPECT_FALSE(pool.free_data_and_scale_blocks(wrong, wrong).ok());
    EXPECT_EQ(pool.blocks().num_used(0), 2);
  }
  const std::vector<int32_t> crossed = {ids[1], ids[0]};
  EXPECT_FALSE(pool.free_data_and_scale_blocks(ids, crossed).ok());
  EXPECT_FALSE(pool.free_data_and_scale_blocks(ids, {}).ok());
  EXPECT_FALSE(pool.allocate_data_and_scale_blocks(3, ids, scales).ok()) << "room for two ids";
  EXPECT_FALSE(pool.allocate_data_and_scale_blocks(-1, ids, scales).ok());
  EXPECT_EQ(pool.blocks().num_used(0), 2);
}

TEST(TurbomindPool, HasScalesForFp4Only) {
  const DataAndScalePool fp4 = pool_of(KvCacheMode::kFp4Mx);
  EXPECT_EQ(fp4.get_scale_block_ptr(3) - fp4.get_scale_block_ptr(2),
            layout_of(KvCacheMode::kFp4Mx).scale_block_bytes);
  EXPECT_EQ(fp4.get_scale_block_ptr(8), nullptr);
  EXPECT_EQ(fp4.get_block_ptr(-1), nullptr);
  const DataAndScalePool int8 = pool_of(KvCacheMode::kInt8);
  EXPECT_NE(int8.get_block_ptr(0), nullptr);
  EXPECT_EQ(int8.get_scale_block_ptr(0), nullptr);
  EXPECT_EQ(int8.pools().scales, nullptr);
}

TEST(TurbomindPool, TablesLeadToTheBlocksOfEverySequence) {
  const DataAndScalePool pool = pool_of(KvCacheMode::kFp4Mx);
  const std::vector<int32_t> first = {4, 0, 7};
  const std::vector<int32_t> none;
  const std::vector<int32_t> last = {2, 4};
  const std::span<const int32_t> sequences[] = {first, none, last};
  PointerTables tables;
  ASSERT_TRUE(tables.assign(pool, sequences).ok());
  EXPECT_EQ(std::vector(tables.cu_block_nums().begin(), tables.cu_block_nums().end()),
            (std::vector<int32_t>{0, 3, 3, 5}));
  for (int s = 0; s < 3; ++s) {
    const SequenceBlocks blocks = tables.blocks_of(s);
    ASSERT_EQ(blocks.data.size(), sequences[s].size());
    ASSERT_EQ(blocks.scales.size(), sequences[s].size());
    for (size_t i = 0; i < blocks.data.size(); ++i) {
      EXPECT_EQ(blocks.data[i], pool.get_block_ptr(sequences[s][i]));
      EXPECT_EQ(blocks.scales[i], pool.get_scale_block_ptr(sequences[s][i]));
    }
    std::vector<int32_t> ids(blocks.data.size());
    ASSERT_TRUE(block_ids_of(pool.pools(), blocks.data, ids).ok());
    EXPECT_EQ(ids, std::vector(sequences[s].begin(), sequences[s].end()));
  }
  const std::vector<int32_t> wrong = {1, 8};
  const std::span<const int32_t> bad[] = {first, wrong};
  const Status refused = tables.assign(pool, bad);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().message, "block 1 of sequence 1 is 8; the pool has 8 blocks");
  EXPECT_EQ(tables.cu_block_nums().size(), 4u) << "nothing has changed";
}

TEST(TurbomindPool, TablesHaveNoScalesWithoutAScalePool) {
  const DataAndScalePool pool = pool_of(KvCacheMode::kInt4);
  const std::vector<int32_t> ids = {1, 2};
  const std::span<const int32_t> sequences[] = {ids};
  PointerTables tables;
  ASSERT_TRUE(tables.assign(pool, sequences).ok());
  EXPECT_EQ(tables.block_ptrs().size(), 2u);
  EXPECT_TRUE(tables.scale_block_ptrs().empty());
  EXPECT_TRUE(tables.blocks_of(0).scales.empty());
}

// What append writes through a layer's view is what the tables' addresses show.
TEST(TurbomindPool, TablesShowWhatAppendHasWritten) {
  const PoolLayout layout = layout_of(KvCacheMode::kFp4Mx);
  DataAndScalePool pool = pool_of(KvCacheMode::kFp4Mx);
  const std::vector<int32_t> ids = {6, 1};
  const LayerBlocks layer = layer_blocks(layout, pool.pools(), 1).value();
  std::vector<float> rows(3 * 32);
  std::iota(rows.begin(), rows.end(), 1.0f);
  const int64_t token = 19;
  const int64_t slots[] = {ids[1] * 16 + 3};
  ops::AppendArgs args;
  args.cache = layer.view();
  args.k = args.v = input_rows(rows.data(), 3, 32);
  args.slot_mapping = slots;

  ASSERT_TRUE(ops::append(scalar_context(), args).ok());

  const std::span<const int32_t> sequences[] = {ids};
  PointerTables tables;
  ASSERT_TRUE(tables.assign(pool, sequences).ok());
  const auto probe = fp4_kv_probe_host(layout, tables.blocks_of(0), 1, 2, token);
  ASSERT_TRUE(probe.ok()) << probe.error().message;
  const uint8_t* scales =
      get_fp4_mx_scale_base(tables.scale_block_ptrs().data(), 1, 2, 3, 16, 32, token);
  EXPECT_EQ(probe.value().k_scale0, scales[0]);
  EXPECT_EQ(probe.value().k_scale1, scales[1]);
  EXPECT_NE(probe.value().k_scale0, 0) << "the row was written there";
}

}  // namespace
}  // namespace kvx::engines::turbomind::turbomind_block_pool_test
