// What a public FP4 path for TurboMind got wrong, as laws of the calls of this library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/api/engines/turbomind_pools.hpp"
#include "tests/api/owned_cache.hpp"

namespace kvx::api_test {
namespace {

constexpr int kPrompt = 64;
constexpr uint32_t kFp4Modes[] = {KVX_TURBOMIND_MODE_FP4_MX, KVX_TURBOMIND_MODE_FP4_NV};

// Rows whose largest value differs from token to token, by powers of two from 2^-6 to 2^6.
std::vector<float> rows_of_many_sizes(int num_tokens, uint32_t heads, uint32_t dim) {
  std::vector<float> rows;
  for (int t = 0; t < num_tokens; ++t) {
    for (uint32_t i = 0; i < heads * dim; ++i) {
      const float value = i % 16 == 0 ? 6.0f : 0.5f + static_cast<float>(i % 4);
      rows.push_back(std::ldexp(value, t % 13 - 6));
    }
  }
  return rows;
}

// A prompt of 64 tokens in blocks of 32, in one append.
struct Prompt {
  Prompt(uint32_t mode, uint32_t dim, uint32_t dtype = KVX_DTYPE_F16)
      : shape{mode, 1, 2, dim, 32, dtype},
        pools(shape),
        layer(pools.args, 0),
        rows(rows_of_many_sizes(kPrompt, 2, dim)) {
    EXPECT_EQ(append_rows(layer.layer, rows, rows, slots_of(sequence, 32)), KVX_STATUS_OK)
        << kvx_last_error();
  }
  std::vector<float> gathered() const {
    std::vector<float> k(rows.size());
    std::vector<float> v(rows.size());
    EXPECT_EQ(gather_rows(layer.layer, sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
    return k;
  }

  TurbomindShape shape;
  TurbomindPools pools;
  TurbomindLayer layer;
  OneSequence sequence{{4, 1}, kPrompt};
  std::vector<float> rows;
};

TEST(TurboMindDefects, DecodeAndPrefillApplyTheScales) {
  for (const uint32_t mode : kFp4Modes) {
    for (const int num_queries : {1, 7}) {
      Prompt prompt(mode, 64);
      const std::vector<float> stored = prompt.gathered();
      Attention attention(prompt.layer.layer, prompt.sequence, num_queries, 64);
      ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
      const std::vector<float> expected = plain_attention(attention.q, stored, stored, num_queries,
                                                          kPrompt, kQHeads, {6, 32, 2, 64});
      double largest = 0;
      for (const float value : expected) largest = std::max(largest, std::fabs(double{value}));
      EXPECT_LT(largest_difference(attention.out, expected), 1e-3 * largest);

      // The last block's V scales, as bytes: attention must see them change.
      for (uint32_t token = 0; token < 32; ++token) {
        prompt.pools.scales[prompt.pools.sizes.scale_block_bytes + token * 8 + 4] ^= 8;
      }
      const std::vector<float> before = attention.out;
      ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK);
      EXPECT_NE(attention.out, before);
    }
  }
}

TEST(TurboMindDefects, EveryTokenOfAPromptHasTheScaleOfItsOwnRow) {
  for (const uint32_t dim : {64u, 128u, 192u}) {
    Prompt prompt(KVX_TURBOMIND_MODE_FP4_MX, dim);
    for (uint32_t token = 0; token < kPrompt; ++token) {
      for (uint32_t head = 0; head < 2; ++head) {
        for (uint32_t group = 0; group < dim / 16; ++group) {
          // The largest value of a group is 6 * 2^(token % 13 - 6), so the exponent is exact.
          const int expected = 127 + static_cast<int>(token % 13) - 6;
          const int64_t block = token < 32 ? 4 : 1;
          ASSERT_EQ(prompt.pools.scale(0, head, block, token % 32, false, group), expected)
              << "token " << token << ", head " << head << ", group " << group;
          ASSERT_EQ(prompt.pools.scale(0, head, block, token % 32, true, group), expected);
        }
      }
    }
  }
}

TEST(TurboMindDefects, ThirtyTwoLayersStayInsideTheirBlock) {
  for (const uint32_t mode : kFp4Modes) {
    TurbomindPools pools({mode, 32, 8, 128, 64}, 1);
    const std::vector<float> rows(64 * 8 * 128, 1.0f);
    std::vector<int64_t> slots(64);
    for (int64_t t = 0; t < 64; ++t) slots[static_cast<size_t>(t)] = t;
    for (uint32_t l = 0; l < 32; ++l) {
      const TurbomindLayer layer(pools.args, l);
      ASSERT_EQ(append_rows(layer.layer, rows, rows, slots), KVX_STATUS_OK) << kvx_last_error();
    }
    EXPECT_THAT(pools.block(0), testing::Not(testing::Contains(kUntouched)));
    EXPECT_THAT(pools.scale_block(0), testing::Not(testing::Contains(kUntouched)));
    EXPECT_THAT(pools.block(1), testing::Each(kUntouched));
    EXPECT_THAT(pools.scale_block(1), testing::Each(kUntouched));
  }
}

TEST(TurboMindDefects, NvStoresE4m3ScalesUnderItsGlobalScale) {
  TurbomindPools pools({.mode = KVX_TURBOMIND_MODE_FP4_NV, .num_layers = 1});
  const std::vector<float> global = {0.5f, 2.0f};
  pools.args.global_k_scales = global.data();
  const TurbomindLayer layer(pools.args, 0);
  const std::vector<float> rows(64, 9.0f);
  ASSERT_EQ(append_rows(layer.layer, rows, rows, {8}), KVX_STATUS_OK) << kvx_last_error();
  // 9 / (6 * 0.5) = 3 and 9 / (6 * 2) = 0.75 in E4M3, and 9 / 6 = 1.5 without a global scale.
  EXPECT_EQ(pools.scale(0, 0, 1, 0, false, 0), 0x44);
  EXPECT_EQ(pools.scale(0, 1, 1, 0, false, 0), 0x34);
  EXPECT_EQ(pools.scale(0, 0, 1, 0, true, 0), 0x3C);
  const OneSequence sequence({1}, 1);
  std::vector<float> k(64);
  std::vector<float> v(64);
  ASSERT_EQ(gather_rows(layer.layer, sequence, k, v), KVX_STATUS_OK);
  EXPECT_THAT(k, testing::Each(9.0f));
  EXPECT_THAT(v, testing::Each(9.0f));
}

TEST(TurboMindDefects, AnArchitectureWithoutFp4IsAnErrorAndNotAnUnquantisedCache) {
  uint32_t mode = 99;
  EXPECT_EQ(kvx_turbomind_mode(16, 80, KVX_TURBOMIND_FP4_AUTO, 0, &mode), KVX_STATUS_UNSUPPORTED);
  EXPECT_EQ(mode, 99u);
  EXPECT_THAT(kvx_last_error(), testing::HasSubstr("sm_version is 80"));
  EXPECT_EQ(kvx_turbomind_mode(16 | 8, 80, KVX_TURBOMIND_FP4_AUTO, 1, &mode), KVX_STATUS_OK);
  EXPECT_EQ(mode, static_cast<uint32_t>(KVX_TURBOMIND_MODE_INT8));
}

TEST(TurboMindDefects, FlattenReadsTheParametersOfIntegerModes) {
  for (const auto& [mode, levels] :
       {std::pair(KVX_TURBOMIND_MODE_INT4, 15.0), std::pair(KVX_TURBOMIND_MODE_INT8, 255.0)}) {
    const Prompt prompt(mode, 64);
    const std::vector<float> k = prompt.gathered();
    for (size_t i = 0; i < k.size(); ++i) {
      const int token = static_cast<int>(i / 128);
      const double range = std::ldexp(5.5, token % 13 - 6);  // 0.5 to 6
      ASSERT_NEAR(k[i], prompt.rows[i], range / levels * 0.6 + range * 2e-3) << "token " << token;
    }
  }
}

TEST(TurboMindDefects, FlattenIsExactWhereAHalfScaleWouldOverflow) {
  TurbomindPools pools({.mode = KVX_TURBOMIND_MODE_FP4_MX, .num_layers = 1});
  const TurbomindLayer layer(pools.args, 0);
  std::vector<float> rows;
  for (const int exponent : {100, -100}) {
    for (int i = 0; i < 64; ++i) rows.push_back(std::ldexp(i % 2 == 0 ? 6.0f : 1.5f, exponent));
  }
  ASSERT_EQ(append_rows(layer.layer, rows, rows, {8, 9}), KVX_STATUS_OK) << kvx_last_error();
  const OneSequence sequence({1}, 2);
  std::vector<float> k(rows.size());
  std::vector<float> v(rows.size());
  ASSERT_EQ(gather_rows(layer.layer, sequence, k, v), KVX_STATUS_OK);
  EXPECT_EQ(k, rows);
  EXPECT_EQ(v, rows);
}

TEST(TurboMindDefects, EveryHeadDimAndGroupOfQueryHeadsIsServed) {
  for (const uint32_t dtype : {KVX_DTYPE_F16, KVX_DTYPE_BF16}) {
    for (const uint32_t dim : {64u, 96u, 128u, 192u, 256u}) {
      Prompt prompt(KVX_TURBOMIND_MODE_FP4_MX, dim, dtype);
      Attention attention(prompt.layer.layer, prompt.sequence, 1, dim);
      EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    }
  }
}

// ---- caches that own blocks in TurboMind's order

struct SequenceTables {
  SequenceTables(const api::Cache& cache, int32_t sequence) {
    EXPECT_EQ(
        kvx_turbomind_sequence_blocks(cache.handle(), sequence, 0, blocks, scales, 8, &num_blocks),
        KVX_STATUS_OK)
        << kvx_last_error();
  }
  void* blocks[8] = {};
  void* scales[8] = {};
  int64_t num_blocks = 0;
};

TEST(TurboMindDefects, ABudgetCountsTheScalePool) {
  kvx_cache_config_t config = owned_config("mxfp4_g16:order=turbomind");
  config.memory_budget_bytes = 100 << 10;
  auto cache = api::Cache::create(config);
  ASSERT_TRUE(cache.ok()) << cache.failure().text;
  auto facts = sized<kvx_block_class_t>();
  ASSERT_EQ(kvx_cache_block_class(cache->handle(), 0, &facts), KVX_STATUS_OK);
  // 2 layers, 2 heads, K and V, 8 tokens: 16 bytes of codes and 2 of scales a row.
  EXPECT_EQ(facts.block_bytes, 2 * 2 * 2 * 8 * (16 + 2) + 0);
  EXPECT_LE(facts.num_blocks * facts.block_bytes, 100 << 10);
  EXPECT_GT((facts.num_blocks + 1) * facts.block_bytes, 100 << 10);
}

TEST(TurboMindDefects, PrefixesAreSharedWithTheirScales) {
  api::Cache cache = sharing_cache("mxfp4_g16:order=turbomind");
  const auto first = cache.create_sequence();
  ASSERT_TRUE(first.ok());
  feed(cache, *first, 0, 24);
  int64_t num_found = 0;
  int32_t second = 0;
  const std::vector<int32_t> prompt = token_ids(0, 30);
  ASSERT_EQ(
      kvx_sequence_create_from(cache.handle(), nullptr, prompt.data(), 30, &second, &num_found),
      KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(num_found, 24);
  const SequenceTables a(cache, *first);
  const SequenceTables b(cache, second);
  ASSERT_EQ(a.num_blocks, 3);
  ASSERT_EQ(b.num_blocks, 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(a.blocks[i], b.blocks[i]);
    EXPECT_EQ(a.scales[i], b.scales[i]);
    EXPECT_NE(a.scales[i], nullptr);
  }
  EXPECT_EQ(rows_of(cache, *first), rows_of(cache, second));
}

// The tables of an owned cache are an engine's: what the cache wrote reads as pools of pointers.
TEST(TurboMindDefects, AnOwnedCachesBlocksAreTurboMinds) {
  for (const auto& [recipe, mode] :
       {std::pair("f16:order=turbomind", KVX_TURBOMIND_MODE_NONE),
        std::pair("int4_affine:scale=f16,order=turbomind", KVX_TURBOMIND_MODE_INT4),
        std::pair("int8_affine:scale=f16,order=turbomind", KVX_TURBOMIND_MODE_INT8),
        std::pair("mxfp4_g16:order=turbomind", KVX_TURBOMIND_MODE_FP4_MX),
        std::pair("nvfp4:order=turbomind", KVX_TURBOMIND_MODE_FP4_NV)}) {
    SCOPED_TRACE(recipe);
    api::Cache cache = sharing_cache(recipe);
    const auto sequence = cache.create_sequence();
    ASSERT_TRUE(sequence.ok());
    feed(cache, *sequence, 0, 21);
    void* blocks[8] = {};
    void* scales[8] = {};
    int64_t num_blocks = 0;
    const bool has_scales = mode >= KVX_TURBOMIND_MODE_FP4_MX;
    ASSERT_EQ(kvx_turbomind_sequence_blocks(cache.handle(), *sequence, 0, blocks,
                                            has_scales ? scales : nullptr, 8, &num_blocks),
              KVX_STATUS_OK)
        << kvx_last_error();
    ASSERT_EQ(num_blocks, 3);
    kvx_turbomind_pools_t pools = pools_of({.mode = static_cast<uint32_t>(mode)});
    std::vector<int32_t> ids(3);
    const void* const* scale_table = has_scales ? scales : nullptr;
    ASSERT_EQ(kvx_turbomind_find_pools(&pools, blocks, scale_table, 3), KVX_STATUS_OK)
        << kvx_last_error();
    ASSERT_EQ(kvx_turbomind_block_ids(&pools, blocks, scale_table, 3, ids.data()), KVX_STATUS_OK);
    const TurbomindLayer layer(pools, kOwnedLayers - 1);
    const OneSequence table(ids, 21);
    std::vector<float> k(size_t{21} * kOwnedHeads * kOwnedDim);
    std::vector<float> v(k.size());
    ASSERT_EQ(gather_rows(layer.layer, table, k, v), KVX_STATUS_OK) << kvx_last_error();
    k.insert(k.end(), v.begin(), v.end());
    EXPECT_EQ(k, rows_of(cache, *sequence));
  }
}

TEST(TurboMindDefects, PointersOfAnotherOrderAreRefused) {
  api::Cache cache = sharing_cache("mxfp4_g16");
  const auto sequence = cache.create_sequence();
  int64_t num_blocks = 0;
  EXPECT_EQ(
      kvx_turbomind_sequence_blocks(cache.handle(), *sequence, 0, nullptr, nullptr, 0, &num_blocks),
      KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), testing::HasSubstr("expected a recipe with order=turbomind"));
  auto page = api::Cache::create(owned_config("int8:source=page,order=turbomind"));
  ASSERT_FALSE(page.ok());
  EXPECT_THAT(page.failure().text, testing::HasSubstr("order=turbomind has no place"));
}

}  // namespace
}  // namespace kvx::api_test
