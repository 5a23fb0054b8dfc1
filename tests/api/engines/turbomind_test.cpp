// TurboMind's pools through the C ABI: bytes, verbs over pointer tables, the probe, bad input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/api/engines/turbomind_pools.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/golden.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;

constexpr uint32_t kAllModes[] = {KVX_TURBOMIND_MODE_NONE, KVX_TURBOMIND_MODE_INT4,
                                  KVX_TURBOMIND_MODE_INT8, KVX_TURBOMIND_MODE_FP4_MX,
                                  KVX_TURBOMIND_MODE_FP4_NV};

TEST(TurboMind, ModesFollowTheBitsOfQuantPolicyAndTheArchitecture) {
  const auto mode_of = [](int policy, uint32_t sm, uint32_t fp4 = KVX_TURBOMIND_FP4_AUTO) {
    uint32_t mode = 99;
    const kvx_status_t status = kvx_turbomind_mode(policy, sm, fp4, 0, &mode);
    return status == KVX_STATUS_OK ? static_cast<int>(mode) : -static_cast<int>(status);
  };
  EXPECT_EQ(mode_of(0, 90), KVX_TURBOMIND_MODE_NONE);
  EXPECT_EQ(mode_of(4, 80), KVX_TURBOMIND_MODE_INT4);
  EXPECT_EQ(mode_of(8, 80), KVX_TURBOMIND_MODE_INT8);
  EXPECT_EQ(mode_of(4 | 8, 80), KVX_TURBOMIND_MODE_INT8);
  EXPECT_EQ(mode_of(16 | 8 | 4, 0), KVX_TURBOMIND_MODE_FP4_MX);
  EXPECT_EQ(mode_of(16, 90), KVX_TURBOMIND_MODE_FP4_MX);
  EXPECT_EQ(mode_of(16, 100), KVX_TURBOMIND_MODE_FP4_NV);
  EXPECT_EQ(mode_of(16, 90, KVX_TURBOMIND_FP4_NV), KVX_TURBOMIND_MODE_FP4_NV);
  EXPECT_EQ(mode_of(1, 90), -KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(mode_of(32, 90), -KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(mode_of(16, 90, 3), -KVX_STATUS_INVALID_ARGUMENT);
}

TEST(TurboMind, BlocksHaveTheBytesOfTheFormulas) {
  // GPT-OSS-120B's share of one GPU: 36 layers, 8 KV heads of 64, blocks of 64.
  const auto sizes_of = [](uint32_t mode) {
    const kvx_turbomind_pools_t pools = pools_of({mode, 36, 8, 64, 64});
    auto sizes = sized<kvx_turbomind_sizes_t>();
    EXPECT_EQ(kvx_turbomind_block_sizes(&pools, &sizes), KVX_STATUS_OK);
    return sizes;
  };
  constexpr uint64_t kRows = 36ull * 8 * 2 * 64;
  EXPECT_EQ(sizes_of(KVX_TURBOMIND_MODE_NONE).block_bytes, kRows * 128);
  EXPECT_EQ(sizes_of(KVX_TURBOMIND_MODE_INT8).block_bytes, kRows * (64 + 4));
  EXPECT_EQ(sizes_of(KVX_TURBOMIND_MODE_INT4).block_bytes, kRows * (32 + 4));
  for (const uint32_t mode : {KVX_TURBOMIND_MODE_FP4_MX, KVX_TURBOMIND_MODE_FP4_NV}) {
    EXPECT_EQ(sizes_of(mode).block_bytes, kRows * 32);
    EXPECT_EQ(sizes_of(mode).scale_block_bytes, kRows * 4);
    EXPECT_EQ(sizes_of(mode).q_bits, 4u);
    EXPECT_EQ(sizes_of(mode).t_bits, 0u);
  }
  EXPECT_EQ(sizes_of(KVX_TURBOMIND_MODE_INT4).t_bits, 16u);
}

// Numbers [layer][head][token][dim] of the oracle as rows of one layer.
kvx_rows_t golden_rows(const std::vector<uint8_t>& numbers, const TurbomindShape& shape,
                       uint32_t layer) {
  const int64_t head = int64_t{shape.block_len} * shape.head_dim;
  const int64_t offset = int64_t{layer} * shape.num_kv_heads * head * 2;  // of 16-bit numbers
  kvx_rows_t rows = api::rows(numbers.data() + offset, static_cast<kvx_dtype_t>(shape.dtype));
  rows.token_stride = shape.head_dim;
  rows.head_stride = head;
  return rows;
}

TEST(TurboMind, AppendWritesTheOraclesBlocks) {
  const tests::Json golden = tests::read_golden("turbomind_blocks");
  const tests::Json& cases = golden.at("written");
  ASSERT_EQ(cases.size(), 10u);
  for (const auto& written : cases) {
    TurbomindShape shape;
    ASSERT_EQ(kvx_turbomind_mode(written.at("policy"), 0, 0, 0, &shape.mode), KVX_STATUS_OK);
    shape.num_layers = written.at("num_layers");
    shape.num_kv_heads = written.at("num_heads");
    shape.head_dim = written.at("head_dim");
    shape.block_len = written.at("block_len");
    const DType dtype = tests::dtype_named(written.at("dtype"));
    shape.dtype = dtype == DType::kF16 ? KVX_DTYPE_F16 : KVX_DTYPE_BF16;
    const std::vector<uint8_t> keys = tests::memory_of(dtype, written.at("keys"));
    const std::vector<uint8_t> values = tests::memory_of(dtype, written.at("values"));
    TurbomindPools pools(shape, 3);
    std::vector<int64_t> slots;
    for (uint32_t t = 0; t < shape.block_len; ++t) slots.push_back(shape.block_len + t);
    for (uint32_t l = 0; l < shape.num_layers; ++l) {
      const TurbomindLayer layer(pools.args, l);
      const kvx_rows_t k = golden_rows(keys, shape, l);
      const kvx_rows_t v = golden_rows(values, shape, l);
      kvx_append_args_t args = append_args(layer.layer, k, slots);
      args.v = &v;
      ASSERT_EQ(kvx_append(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    }
    EXPECT_TRUE(tests::same_bytes(tests::bytes_of_hex(written.at("block")), pools.block(1)));
    EXPECT_TRUE(
        tests::same_bytes(tests::bytes_of_hex(written.at("scale_block")), pools.scale_block(1)));
    for (const int other : {0, 2}) {
      EXPECT_THAT(pools.block(other), testing::Each(kUntouched));
      EXPECT_THAT(pools.scale_block(other), testing::Each(kUntouched));
    }
  }
}

// Blocks that lie anywhere, in an order of their own, as an engine with several chunks has them.
struct ScatteredBlocks {
  ScatteredBlocks(const TurbomindShape& shape, std::vector<int> places) {
    pools = pools_of(shape);
    EXPECT_EQ(kvx_turbomind_block_sizes(&pools, &sizes), KVX_STATUS_OK);
    // A distance that is no multiple of a block, and more than one.
    constexpr uint64_t kUnit = 48;
    data.resize((sizes.block_bytes / kUnit + 3) * kUnit * 10);
    scales.resize((sizes.scale_block_bytes / kUnit + 3) * kUnit * 10);
    const uint64_t step = (sizes.block_bytes / kUnit + 3) * kUnit;
    const uint64_t scale_step = (sizes.scale_block_bytes / kUnit + 3) * kUnit;
    for (const int place : places) {
      const auto at = static_cast<uint64_t>(place);
      block_ptrs.push_back(data.data() + at * step);
      if (sizes.scale_block_bytes > 0) scale_ptrs.push_back(scales.data() + at * scale_step);
    }
    // Without a scale pool, whose blocks would have to lie alike, ids may count less than a block.
    if (scale_ptrs.empty())
      block_ptrs.back() = static_cast<const uint8_t*>(block_ptrs.back()) + kUnit;
  }
  const void* const* scale_table() const {
    return scale_ptrs.empty() ? nullptr : scale_ptrs.data();
  }

  kvx_turbomind_pools_t pools;
  kvx_turbomind_sizes_t sizes = sized<kvx_turbomind_sizes_t>();
  std::vector<uint8_t> data;
  std::vector<uint8_t> scales;
  std::vector<const void*> block_ptrs;
  std::vector<const void*> scale_ptrs;
};

// Two blocks of an allocator are always at one distance, and what lies between them is another's:
// here the caller's own rows.
TEST(TurboMind, MemoryBetweenTheBlocksOfPointersIsNotThePools) {
  for (const uint32_t mode : kAllModes) {
    SCOPED_TRACE(mode);
    kvx_turbomind_pools_t pools = pools_of({.mode = mode});
    auto sizes = sized<kvx_turbomind_sizes_t>();
    ASSERT_EQ(kvx_turbomind_block_sizes(&pools, &sizes), KVX_STATUS_OK) << kvx_last_error();
    const std::vector<float> rows = test_rows(11, 2, 32, 0.3f);
    const size_t distance = sizes.block_bytes + rows.size() * sizeof(float);
    std::vector<float> memory((distance + sizes.block_bytes) / sizeof(float));
    auto* const bytes = reinterpret_cast<uint8_t*>(memory.data());
    float* const between = memory.data() + sizes.block_bytes / sizeof(float);
    std::ranges::copy(rows, between);
    std::vector<uint8_t> scale_blocks(2 * sizes.scale_block_bytes);
    const void* const block_ptrs[] = {bytes, bytes + distance};
    const void* const scale_ptrs[] = {scale_blocks.data(),
                                      scale_blocks.data() + sizes.scale_block_bytes};
    ASSERT_EQ(kvx_turbomind_find_pools(&pools, block_ptrs,
                                       scale_blocks.empty() ? nullptr : scale_ptrs, 2),
              KVX_STATUS_OK)
        << kvx_last_error();
    EXPECT_EQ(pools.is_scattered, 1u);
    const TurbomindLayer layer(pools, 1);
    const OneSequence sequence({0, 1}, 11);
    const std::vector<int64_t> slots = slots_of(sequence, 8);
    const kvx_rows_t k_rows = api::rows(between, KVX_DTYPE_F32);
    const kvx_append_args_t args = append_args(layer.layer, k_rows, slots);
    EXPECT_EQ(kvx_append(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_TRUE(std::equal(rows.begin(), rows.end(), between));
  }
}

TEST(TurboMind, VerbsReadAndWriteBlocksThatPointersName) {
  const std::vector<float> k = test_rows(kTokens, 2, 32, 0.3f);
  const std::vector<float> v = test_rows(kTokens, 2, 32, 1.9f);
  for (const uint32_t mode : kAllModes) {
    SCOPED_TRACE(mode);
    const TurbomindShape shape{.mode = mode};
    ScatteredBlocks blocks(shape, {7, 2, 4});
    ASSERT_EQ(
        kvx_turbomind_find_pools(&blocks.pools, blocks.block_ptrs.data(), blocks.scale_table(), 3),
        KVX_STATUS_OK)
        << kvx_last_error();
    EXPECT_EQ(blocks.pools.data, blocks.block_ptrs[1]);
    EXPECT_EQ(blocks.pools.is_scattered, 1u);
    std::vector<int32_t> ids(3);
    ASSERT_EQ(kvx_turbomind_block_ids(&blocks.pools, blocks.block_ptrs.data(), blocks.scale_table(),
                                      3, ids.data()),
              KVX_STATUS_OK)
        << kvx_last_error();
    const TurbomindLayer layer(blocks.pools, 1);
    const OneSequence sequence(ids, kTokens);
    ASSERT_EQ(append_rows(layer.layer, k, v, slots_of(sequence, 8)), KVX_STATUS_OK)
        << kvx_last_error();

    TurbomindPools dense(shape);
    const TurbomindLayer dense_layer(dense.args, 1);
    const OneSequence dense_sequence({3, 5, 0}, kTokens);
    ASSERT_EQ(append_rows(dense_layer.layer, k, v, slots_of(dense_sequence, 8)), KVX_STATUS_OK);
    Attention scattered(layer.layer, sequence, 3);
    Attention expected(dense_layer.layer, dense_sequence, 3);
    ASSERT_EQ(kvx_attend(&scattered.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    ASSERT_EQ(kvx_attend(&expected.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(scattered.out, expected.out);
    const size_t layer_bytes = blocks.sizes.block_bytes / 2;  // layer 1 of 2
    EXPECT_TRUE(tests::same_bytes(
        dense.block(5).subspan(layer_bytes),
        {static_cast<const uint8_t*>(blocks.block_ptrs[1]) + layer_bytes, layer_bytes}));
  }
}

TEST(TurboMind, FlattenIsGatherWithTheStridesOfBhsd) {
  // Token ranges of two sequences to [B = 2, H = 2, S = 5, D = 32].
  const TurbomindShape shape{.mode = KVX_TURBOMIND_MODE_FP4_MX};
  TurbomindPools pools(shape);
  const TurbomindLayer layer(pools.args, 0);
  const OneSequence sequence({4, 1, 5}, kTokens);
  ASSERT_EQ(append_rows(layer.layer, test_rows(kTokens, 2, 32, 0.3f),
                        test_rows(kTokens, 2, 32, 1.9f), slots_of(sequence, 8)),
            KVX_STATUS_OK);
  std::vector<float> all_k(size_t{kTokens} * 64);
  std::vector<float> all_v(all_k.size());
  ASSERT_EQ(gather_rows(layer.layer, sequence, all_k, all_v), KVX_STATUS_OK);

  constexpr int64_t kHeads = 2;
  constexpr int64_t kLength = 5;
  constexpr int64_t kDim = 32;
  std::vector<float> k(2 * kHeads * kLength * kDim, -7.0f);
  kvx_rows_t rows = api::rows(k.data(), KVX_DTYPE_F32);
  rows.token_stride = kDim;
  rows.head_stride = kLength * kDim;
  kvx_gather_args_t args = gather_args(layer.layer, sequence, rows);
  const int32_t sequences[] = {0, 0};
  const int64_t first_tokens[] = {3, 16};
  const int64_t num_tokens[] = {5, 4};
  const int64_t first_rows[] = {0, kHeads * kLength};
  args.num_ranges = 2;
  args.sequences = sequences;
  args.first_tokens = first_tokens;
  args.num_tokens = num_tokens;
  args.first_rows = first_rows;
  ASSERT_EQ(kvx_gather(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t t = 0; t < kLength; ++t) {
        const bool is_read = t < num_tokens[b];
        const int64_t token = first_tokens[b] + t;
        EXPECT_EQ(k[((b * kHeads + h) * kLength + t) * kDim + 9],
                  is_read ? all_k[(token * kHeads + h) * kDim + 9] : -7.0f);
      }
    }
  }
}

TEST(TurboMind, TheProbeReadsWhatAppendWrote) {
  for (const uint32_t mode : {KVX_TURBOMIND_MODE_FP4_MX, KVX_TURBOMIND_MODE_FP4_NV}) {
    TurbomindPools pools({.mode = mode});
    const OneSequence sequence({4, 1, 5}, kTokens);
    for (uint32_t l = 0; l < 2; ++l) {
      const TurbomindLayer layer(pools.args, l);
      const auto seed = static_cast<float>(l);
      ASSERT_EQ(append_rows(layer.layer, test_rows(kTokens, 2, 32, seed),
                            test_rows(kTokens, 2, 32, seed + 0.5f), slots_of(sequence, 8)),
                KVX_STATUS_OK);
    }
    std::vector<const void*> blocks;
    std::vector<const void*> scales;
    for (const int32_t id : sequence.blocks) {
      blocks.push_back(pools.block(id).data());
      scales.push_back(pools.scale_block(id).data());
    }
    // A token of the second block: its scales are at token 1 of block 1.
    auto probe = sized<kvx_turbomind_probe_t>();
    ASSERT_EQ(kvx_turbomind_probe(&pools.args, blocks.data(), scales.data(), 3, 1, 1, 9, 0, nullptr,
                                  &probe),
              KVX_STATUS_OK)
        << kvx_last_error();
    EXPECT_EQ(probe.k_scale0, pools.scale(1, 1, 1, 1, false, 0));
    EXPECT_EQ(probe.k_scale1, pools.scale(1, 1, 1, 1, false, 1));
    EXPECT_EQ(probe.v_scale0, pools.scale(1, 1, 1, 1, true, 0));
    EXPECT_EQ(probe.v_scale1, pools.scale(1, 1, 1, 1, true, 1));
    // layer 1, head 1, K, token 1: rows of 16 bytes.
    EXPECT_EQ(probe.kv_byte0, pools.block(1)[(2 * 2 + 2) * 8 * 16 + 16]);
    EXPECT_EQ(kvx_turbomind_probe(&pools.args, blocks.data(), scales.data(), 3, 1, 1, 24, 0,
                                  nullptr, &probe),
              KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(kvx_last_error(), HasSubstr("token is 24; expected 0 to 23"));
  }
}

TEST(TurboMind, SearchedScalesChangeNoLayoutAndLowerTheError) {
  const std::vector<float> k = test_rows(kTokens, 2, 32, 0.3f);
  const auto error_of = [&k](uint32_t scale_choice) {
    TurbomindPools pools({.mode = KVX_TURBOMIND_MODE_FP4_MX});
    pools.args.scale_choice = scale_choice;
    const TurbomindLayer layer(pools.args, 0);
    const OneSequence sequence({4, 1, 5}, kTokens);
    EXPECT_EQ(append_rows(layer.layer, k, k, slots_of(sequence, 8)), KVX_STATUS_OK)
        << kvx_last_error();
    std::vector<float> read(k.size());
    std::vector<float> read_v(k.size());
    EXPECT_EQ(gather_rows(layer.layer, sequence, read, read_v), KVX_STATUS_OK);
    double sum = 0;
    for (size_t i = 0; i < k.size(); ++i) sum += std::pow(static_cast<double>(read[i]) - k[i], 2);
    return sum;
  };
  EXPECT_LT(error_of(KVX_SCALE_CHOICE_SEARCH), error_of(KVX_SCALE_CHOICE_DEFAULT));
}

TEST(TurboMind, RefusesWhatDoesNotFitAndNamesTheField) {
  const auto refusal = [](auto change) {
    TurbomindPools pools({.mode = KVX_TURBOMIND_MODE_FP4_MX});
    uint32_t layer = 0;
    change(pools.args, layer);
    auto k = sized<kvx_side_t>();
    auto v = sized<kvx_side_t>();
    EXPECT_EQ(kvx_turbomind_layer(&pools.args, layer, &k, &v), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(k.codes, nullptr);
    return std::string(kvx_last_error());
  };
  using Pools = kvx_turbomind_pools_t;
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.mode = 5; }), HasSubstr("pools.mode is 5"));
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.dtype = KVX_DTYPE_F32; }),
              HasSubstr("pools.dtype is 3"));
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.num_layers = 0; }), HasSubstr("num_layers is 0"));
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.head_dim = 24; }), HasSubstr("head_dim is 24"));
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.scales = nullptr; }),
              HasSubstr("the scale pool is null"));
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.data = nullptr; }),
              HasSubstr("the data pool is null"));
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.data_stride = 8; }),
              HasSubstr("data_stride is 8"));
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.num_blocks = 0; }), HasSubstr("num_blocks is 0"));
  EXPECT_THAT(refusal([](Pools& p, uint32_t&) { p.scale_choice = 9; }),
              HasSubstr("scale_choice is 9"));
  EXPECT_THAT(refusal([](Pools&, uint32_t& layer) { layer = 2; }), HasSubstr("layer is 2"));
  const float one = 1;
  EXPECT_THAT(refusal([&one](Pools& p, uint32_t&) { p.global_k_scales = &one; }),
              HasSubstr("only fp4 nv has global scales"));
  EXPECT_EQ(kvx_turbomind_layer(nullptr, 0, nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(TurboMind, RefusesTablesWhoseBlocksOverlapOrWhoseScalesLieElsewhere) {
  const TurbomindShape shape{.mode = KVX_TURBOMIND_MODE_FP4_MX};
  ScatteredBlocks blocks(shape, {7, 2, 4});
  const auto status = [&blocks] {
    return kvx_turbomind_find_pools(&blocks.pools, blocks.block_ptrs.data(), blocks.scale_table(),
                                    3);
  };
  const std::vector<const void*> good = blocks.block_ptrs;
  blocks.block_ptrs[0] = static_cast<const uint8_t*>(good[1]) + 16;
  EXPECT_EQ(status(), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("two blocks that are 16 bytes apart"));
  blocks.block_ptrs[0] = nullptr;
  EXPECT_EQ(status(), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("block_ptrs[0] is null"));
  blocks.block_ptrs = good;
  std::swap(blocks.scale_ptrs[0], blocks.scale_ptrs[2]);
  EXPECT_EQ(status(), KVX_STATUS_UNSUPPORTED);
  EXPECT_THAT(kvx_last_error(), HasSubstr("expected scale blocks in the order"));
  std::swap(blocks.scale_ptrs[0], blocks.scale_ptrs[2]);
  ASSERT_EQ(status(), KVX_STATUS_OK);
  std::vector<int32_t> ids(3, -9);
  blocks.block_ptrs[2] = static_cast<const uint8_t*>(good[2]) + 1;
  EXPECT_EQ(kvx_turbomind_block_ids(&blocks.pools, blocks.block_ptrs.data(), blocks.scale_table(),
                                    3, ids.data()),
            KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(ids[0], -9);
}

}  // namespace
}  // namespace kvx::api_test
