// TurboMind's sizes and offsets: against the oracle's figures, and the layout defects of the public
// FP4 fork as tests.
#include "engines/turbomind/layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/engines/turbomind_golden.hpp"

namespace kvx::engines::turbomind::layout_test {
namespace {

using ::testing::HasSubstr;

constexpr Geometry kLlama8B = {KvCacheMode::kNone, DType::kF16, 32, 8, 128, 64};

PoolLayout layout_of(Geometry geometry) {
  Result<PoolLayout> layout = make_pool_layout(geometry);
  if (!layout.ok()) ADD_FAILURE() << layout.error().message;
  return layout.ok() ? layout.value() : PoolLayout{};
}
PoolLayout llama_layout(KvCacheMode mode) {
  Geometry geometry = kLlama8B;
  geometry.mode = mode;
  return layout_of(geometry);
}

TEST(TurboMindLayout, HasTheOraclesSizesForEveryPolicy) {
  for (const auto& expected : golden_file().at("sizes")) {
    const PoolLayout layout = layout_of(geometry_of(expected, DType::kF16));
    SCOPED_TRACE(shape_text(expected));
    EXPECT_EQ(layout.token_data_bytes, expected.at("token_data_bytes"));
    EXPECT_EQ(layout.token_param_bytes, expected.at("token_param_bytes"));
    EXPECT_EQ(layout.layer_bytes, expected.at("layer_bytes"));
    EXPECT_EQ(layout.block_bytes, expected.at("block_bytes"));
    EXPECT_EQ(layout.scale_block_bytes, expected.at("scale_block_bytes"));
  }
}

TEST(TurboMindLayout, HasTheOraclesOffsetsForEveryPolicy) {
  for (const auto& expected : golden_file().at("sizes")) {
    const PoolLayout layout = layout_of(geometry_of(expected, DType::kF16));
    SCOPED_TRACE(shape_text(expected));
    for (const auto& row : expected.at("offsets")) {
      const int layer = row[0], head = row[1], token = row[3];
      const KvSide side = row[2] == 0 ? KvSide::kKey : KvSide::kValue;
      SCOPED_TRACE(row.dump());
      EXPECT_EQ(layout.data_offset(layer, head, side, token), row[4]);
      if (row[5] != -1) {
        EXPECT_EQ(layout.param_offset(layer, head, side, token), row[5]);
      }
      if (row[6] != -1) {
        EXPECT_EQ(layout.scale_offset(layer, head, side, token), row[6]);
      }
    }
  }
}

// The exact ratios to FP8 and FP16 are 1.78 and 3.56, not "about 2".
TEST(TurboMindLayout, CostsExactlyTheseBytesABlockInEveryMode) {
  EXPECT_EQ(llama_layout(KvCacheMode::kNone).bytes_per_block(), 8'388'608);
  EXPECT_EQ(llama_layout(KvCacheMode::kInt8).bytes_per_block(), 4'325'376);
  EXPECT_EQ(llama_layout(KvCacheMode::kInt4).bytes_per_block(), 2'228'224);
  EXPECT_EQ(llama_layout(KvCacheMode::kFp4Mx).bytes_per_block(), 2'097'152 + 262'144);
  EXPECT_EQ(llama_layout(KvCacheMode::kFp4Nv).bytes_per_block(), 2'097'152 + 262'144);
}

TEST(TurboMindLayout, AnswersUnderTurboMindsOwnName) {
  const auto size = get_cache_block_size(DType::kBF16, KvCacheMode::kInt4, 30, 3, 64, 64);
  const auto scales = get_cache_scale_block_size(DType::kBF16, KvCacheMode::kFp4Nv, 30, 3, 64, 64);
  ASSERT_TRUE(size.ok() && scales.ok());
  EXPECT_EQ(size.value(), 414'720);
  EXPECT_EQ(scales.value(), 46'080);
}

// The fork's kernels believe in 16 parameter bits that the allocation does not have: a layer stride
// of 69,632 bytes where 65,536 are allocated, so that layers 30 and 31 of 32 lie outside the block.
TEST(TurboMindLayout, KeepsAll32LayersInsideTheBlockBecauseFp4HasNoParameters) {
  const PoolLayout layout = llama_layout(KvCacheMode::kFp4Mx);
  EXPECT_EQ(layout.layer_bytes, 65'536);
  EXPECT_EQ(layout.data_offset(31, 7, KvSide::kValue, 63) + layout.token_data_bytes,
            layout.block_bytes);
  EXPECT_EQ(layout.scale_offset(31, 7, KvSide::kValue, 63) + layout.token_scale_bytes,
            layout.scale_block_bytes);
}

// The fork gives the data pool its share of the memory first and then allocates the scale pool
// beside it.
TEST(TurboMindLayout, CountsTheScalePoolInTheBudget) {
  const PoolLayout layout = llama_layout(KvCacheMode::kFp4Mx);
  const int64_t budget = 100 * layout.block_bytes;
  const int64_t num_blocks = blocks_within_budget(layout, budget);
  EXPECT_EQ(num_blocks, 88);  // 100 * 8 / 9
  EXPECT_LE(num_blocks * (layout.block_bytes + layout.scale_block_bytes), budget);
}

TEST(TurboMindLayout, GivesEveryRowBytesOfItsOwn) {
  for (const KvCacheMode mode : {KvCacheMode::kNone, KvCacheMode::kInt4, KvCacheMode::kInt8,
                                 KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
    const PoolLayout layout = layout_of({mode, DType::kF16, 3, 2, 48, 5});
    std::vector<int> data_uses(layout.block_bytes), scale_uses(layout.scale_block_bytes);
    const auto use = [](std::vector<int>& uses, int64_t offset, int64_t bytes) {
      for (int64_t i = offset; i < offset + bytes; ++i) ++uses.at(i);
    };
    for (int layer = 0; layer < 3; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (const KvSide side : {KvSide::kKey, KvSide::kValue}) {
          for (int token = 0; token < 5; ++token) {
            use(data_uses, layout.data_offset(layer, head, side, token), layout.token_data_bytes);
            use(data_uses, layout.param_offset(layer, head, side, token), layout.token_param_bytes);
            use(scale_uses, layout.scale_offset(layer, head, side, token),
                layout.token_scale_bytes);
          }
        }
      }
    }
    EXPECT_THAT(data_uses, ::testing::Each(1)) << name_of(mode);
    EXPECT_THAT(scale_uses, ::testing::Each(1)) << name_of(mode);
  }
}

TEST(TurboMindLayout, FindsScalesThroughTheSequencesBlocks) {
  const PoolLayout layout = layout_of({KvCacheMode::kFp4Mx, DType::kF16, 2, 3, 64, 4});
  std::vector<uint8_t> blocks[3];
  std::vector<uint8_t*> table;
  for (auto& block : blocks) {
    block.resize(layout.scale_block_bytes);
    table.push_back(block.data());
  }
  for (int token = 0; token < 12; ++token) {
    uint8_t* expected = table[token / 4] + layout.scale_offset(1, 2, KvSide::kKey, token % 4);
    EXPECT_EQ(get_fp4_mx_scale_base(table.data(), 1, 2, 3, 4, 64, token), expected);
    EXPECT_EQ(get_fp4_nv_scale_base(table.data(), 1, 2, 3, 4, 64, token), expected);
  }
}

TEST(TurboMindLayout, TurnsATableOfPointersIntoIds) {
  uint8_t around[96];
  uint8_t* memory = around + 16;
  const Pools pools = {.data = memory, .data_stride = 16, .num_blocks = 4};
  const uint8_t* pointers[] = {memory + 48, memory, memory + 16};
  int32_t ids[3];
  ASSERT_TRUE(block_ids_of(pools, pointers, ids).ok());
  EXPECT_THAT(ids, ::testing::ElementsAre(3, 0, 1));

  for (const uint8_t* foreign : {memory + 8, memory + 64, memory - 16}) {
    const uint8_t* table[] = {foreign};
    const Status status = block_ids_of(pools, table, {ids, 1});
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  }
}

TEST(TurboMindLayout, RefusesAGeometryThatTheModeCannotStore) {
  const auto message = [](Geometry geometry) {
    const auto layout = make_pool_layout(geometry);
    return layout.ok() ? std::string("accepted") : layout.error().message;
  };
  Geometry geometry = kLlama8B;
  geometry.mode = KvCacheMode::kFp4Mx;
  geometry.head_dim = 72;
  EXPECT_THAT(message(geometry), HasSubstr("head_dim is 72; mxfp4_g16 needs a multiple of 16"));
  geometry.head_dim = 0;
  EXPECT_THAT(message(geometry), HasSubstr("head_dim is 0"));
  geometry = kLlama8B;
  geometry.num_layers = 0;
  EXPECT_THAT(message(geometry), HasSubstr("num_layers is 0"));
  geometry = kLlama8B;
  geometry.num_kv_heads = -1;
  EXPECT_THAT(message(geometry), HasSubstr("num_kv_heads is -1"));
  geometry = kLlama8B;
  geometry.block_len = 0;
  EXPECT_THAT(message(geometry), HasSubstr("block_len is 0"));
}

TEST(TurboMindLayout, RefusesABlockThatNoIntegerCounts) {
  constexpr int kMax = std::numeric_limits<int>::max();
  const auto layout = make_pool_layout({KvCacheMode::kInt8, DType::kF16, kMax, kMax, 128, kMax});
  ASSERT_FALSE(layout.ok());
  EXPECT_EQ(layout.error().code, ErrorCode::kOutOfRange);
}

TEST(TurboMindLayout, RefusesPoolsThatDoNotHoldTheBlocks) {
  const PoolLayout layout = layout_of({KvCacheMode::kFp4Nv, DType::kF16, 2, 2, 32, 4});
  std::vector<uint8_t> data(2 * layout.block_bytes), scales(2 * layout.scale_block_bytes);
  const Pools good = {data.data(), layout.block_bytes, scales.data(), layout.scale_block_bytes, 2};
  ASSERT_TRUE(layer_blocks(layout, good, 1).ok());
  const auto message = [&](const Pools& pools, int layer, const GlobalScales& global = {}) {
    const auto blocks = layer_blocks(layout, pools, layer, global);
    return blocks.ok() ? std::string("accepted") : blocks.error().message;
  };

  Pools pools = good;
  pools.scales = nullptr;
  EXPECT_THAT(message(pools, 0), HasSubstr("scale pool is null"));
  pools = good;
  pools.scale_stride -= 1;
  EXPECT_THAT(message(pools, 0), HasSubstr("scale_stride is 63"));
  pools = good;
  pools.data_stride -= 1;
  EXPECT_THAT(message(pools, 0), HasSubstr("data_stride is 511"));
  pools = good;
  pools.num_blocks = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(message(pools, 0), HasSubstr("passes 2^63"));
  EXPECT_THAT(message(good, 2), HasSubstr("layer is 2; expected 0 to 1"));

  const float bad[] = {1, 1, 1, -2};
  EXPECT_THAT(message(good, 1, {.k = bad}), HasSubstr("global_k_scales[1][1]: tensor scale is -2"));
  EXPECT_EQ(message(good, 0, {.k = bad}), "accepted");
}

TEST(TurboMindLayout, RefusesGlobalScalesWhereNothingReadsThem) {
  const PoolLayout layout = layout_of({KvCacheMode::kInt8, DType::kF16, 1, 1, 32, 4});
  std::vector<uint8_t> data(layout.block_bytes);
  const float scale = 1;
  const Pools pools = {.data = data.data(), .data_stride = layout.block_bytes, .num_blocks = 1};
  const auto blocks = layer_blocks(layout, pools, 0, {.v = &scale});
  ASSERT_FALSE(blocks.ok());
  EXPECT_THAT(blocks.error().message, HasSubstr("global_v_scales"));
}

}  // namespace
}  // namespace kvx::engines::turbomind::layout_test
