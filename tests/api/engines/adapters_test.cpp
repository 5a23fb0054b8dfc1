// kvx/engines/*.hpp: layouts filled element by element by their public definitions, read by gather.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kvx/engines/flashinfer.hpp"
#include "kvx/engines/llamacpp.hpp"
#include "kvx/engines/sglang.hpp"
#include "kvx/engines/tgi.hpp"
#include "kvx/engines/trtllm.hpp"
#include "kvx/engines/turbomind.hpp"
#include "kvx/engines/vllm.hpp"
#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::adapters_test {
namespace {

using api::Layer;
using api::engines::Tensor;
using testing::HasSubstr;

constexpr int kBlocks = 6;
constexpr int kBlockTokens = 8;
constexpr int kHeads = 2;
constexpr int kDim = 32;

// A number that tells every place apart, exact in f32.
float number(int block, int token, int head, int dim, bool is_v) {
  return static_cast<float>((((block * kBlockTokens + token) * kHeads + head) * kDim + dim) * 2 +
                            (is_v ? 1 : 0));
}

// Writes every number of K and V at element_of(block, token, head, dim).
template <class ElementOf>
void fill(std::vector<float>& memory, bool is_v, ElementOf element_of) {
  for (int b = 0; b < kBlocks; ++b) {
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        for (int d = 0; d < kDim; ++d) {
          memory.at(static_cast<size_t>(element_of(b, t, h, d))) = number(b, t, h, d, is_v);
        }
      }
    }
  }
}

// Gathers the sequence of the table's blocks, whose blocks of tokens are `blocks`.
void expect_rows(const api::Result<Layer>& layer, const std::vector<int32_t>& ids,
                 const std::vector<int>& blocks) {
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  const OneSequence sequence(ids, static_cast<int32_t>(blocks.size()) * kBlockTokens);
  std::vector<float> k(blocks.size() * kBlockTokens * kHeads * kDim);
  std::vector<float> v(k.size());
  ASSERT_EQ(gather_rows(*layer->get(), sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
  size_t i = 0;
  for (const int block : blocks) {
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        for (int d = 0; d < kDim; ++d, ++i) {
          ASSERT_EQ(k[i], number(block, t, h, d, false)) << block << " " << t << " " << h;
          ASSERT_EQ(v[i], number(block, t, h, d, true)) << block << " " << t << " " << h;
        }
      }
    }
  }
}

constexpr size_t kNumbers = size_t{kBlocks} * kBlockTokens * kHeads * kDim;

TEST(EngineAdapters, ReadVllmsNhdAndHndCaches) {
  for (const bool is_hnd : {false, true}) {
    std::vector<float> memory(2 * kNumbers);
    const int64_t token = is_hnd ? 2 * kDim : 2 * kDim * kHeads;
    const int64_t head = is_hnd ? 2 * kDim * kBlockTokens : 2 * kDim;
    constexpr int64_t kBlock = 2 * kDim * kHeads * kBlockTokens;
    for (const bool is_v : {false, true}) {
      fill(memory, is_v, [&](int b, int t, int h, int d) {
        return b * kBlock + t * token + h * head + (is_v ? kDim : 0) + d;
      });
    }
    const Tensor kv_cache{memory.data(),
                          KVX_DTYPE_F32,
                          {kBlocks, kHeads, kBlockTokens, 2 * kDim},
                          {kBlock, head, token, 1}};
    expect_rows(api::vllm::layer({kv_cache}), {4, 1}, {4, 1});
  }
}

TEST(EngineAdapters, ReadFlashInfersSglangsAndTgisTensors) {
  std::vector<float> nhd(2 * kNumbers);
  constexpr int64_t kPage = int64_t{kBlockTokens} * kHeads * kDim;
  for (const bool is_v : {false, true}) {
    fill(nhd, is_v, [&](int b, int t, int h, int d) {
      return (2 * b + (is_v ? 1 : 0)) * kPage + (t * kHeads + h) * kDim + d;
    });
  }
  const Tensor pages{nhd.data(), KVX_DTYPE_F32, {kBlocks, 2, kBlockTokens, kHeads, kDim}};
  expect_rows(api::flashinfer::layer(pages, api::flashinfer::KvLayout::kNhd), {4, 1}, {4, 1});
  EXPECT_EQ(api::flashinfer::seq_lens({0, 2, 2, 5}, {3, 8, 1}, 8),
            (std::vector<int32_t>{11, 0, 17}));

  std::vector<float> k(kNumbers);
  std::vector<float> v(kNumbers);
  const auto by_slot = [](int b, int t, int h, int d) {
    return ((b * kBlockTokens + t) * kHeads + h) * kDim + d;
  };
  fill(k, false, by_slot);
  fill(v, true, by_slot);
  const std::vector<int64_t> slots = {kBlocks * kBlockTokens, kHeads, kDim};
  expect_rows(api::sglang::layer({k.data(), KVX_DTYPE_F32, slots}, {v.data(), KVX_DTYPE_F32, slots},
                                 kBlockTokens),
              {4, 1}, {4, 1});
  const std::vector<int64_t> blocks = {kBlocks, kBlockTokens, kHeads, kDim};
  expect_rows(
      api::tgi::flash_layer({k.data(), KVX_DTYPE_F32, blocks}, {v.data(), KVX_DTYPE_F32, blocks}),
      {5, 0}, {5, 0});
}

TEST(EngineAdapters, ReadTgisPagedLayout) {
  std::vector<float> k(kNumbers);
  std::vector<float> v(kNumbers);
  constexpr int kX = 4;
  fill(k, false, [](int b, int t, int h, int d) {
    return (((b * kHeads + h) * (kDim / kX) + d / kX) * kBlockTokens + t) * kX + d % kX;
  });
  fill(v, true,
       [](int b, int t, int h, int d) { return ((b * kHeads + h) * kDim + d) * kBlockTokens + t; });
  expect_rows(api::tgi::paged_layer(
                  {k.data(), KVX_DTYPE_F32, {kBlocks, kHeads, kDim / kX, kBlockTokens, kX}},
                  {v.data(), KVX_DTYPE_F32, {kBlocks, kHeads, kDim, kBlockTokens}}),
              {4, 1}, {4, 1});
}

TEST(EngineAdapters, ReadTensorRtsPoolsByTheirOffsets) {
  constexpr int64_t kLayers = 3;
  constexpr int64_t kBlock = int64_t{kBlockTokens} * kHeads * kDim;
  std::vector<float> memory(2 * kLayers * kNumbers);
  for (const bool is_v : {false, true}) {
    fill(memory, is_v, [&](int b, int t, int h, int d) {
      return ((b * kLayers + 1) * 2 + (is_v ? 1 : 0)) * kBlock + (h * kBlockTokens + t) * kDim + d;
    });
  }
  const api::trtllm::Pool pool{
      {memory.data(), KVX_DTYPE_F32, {kBlocks, kLayers, 2, kBlock}}, kHeads, kBlockTokens, kDim};
  const auto layer = api::trtllm::layer(pool, 1);
  const auto index = [](int block) {
    return static_cast<int32_t>(api::trtllm::block_index(block, kLayers));
  };
  expect_rows(layer, {index(4), index(1)}, {4, 1});

  OneSequence sequence({}, 2 * kBlockTokens);
  const std::vector<int32_t> offsets = {index(5), index(0), index(5) + 1, index(0) + 1};
  sequence.table = api::trtllm::offsets_table(offsets.data(), 1, 1, 2);
  std::vector<float> k(2 * kBlock);
  std::vector<float> v(2 * kBlock);
  ASSERT_EQ(gather_rows(*layer->get(), sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(k[kDim + 3], number(5, 0, 1, 3, false));
  EXPECT_EQ(v[kBlock + kDim + 3], number(0, 0, 1, 3, true));
}

TEST(EngineAdapters, ReadLlamaCppsStreams) {
  std::vector<float> k(kNumbers);
  std::vector<float> v(kNumbers);
  constexpr int kCells = kBlocks * kBlockTokens;
  fill(k, false,
       [](int b, int t, int h, int d) { return ((b * kBlockTokens + t) * kHeads + h) * kDim + d; });
  fill(v, true,
       [](int b, int t, int h, int d) { return (h * kDim + d) * kCells + b * kBlockTokens + t; });
  api::llamacpp::Cache cache;
  cache.k = k.data();
  cache.v = v.data();
  cache.type_k = cache.type_v = api::llamacpp::Type::kF32;
  cache.num_kv_heads = kHeads;
  cache.head_dim_k = cache.head_dim_v = kDim;
  cache.kv_size = kCells;
  cache.v_trans = true;
  expect_rows(api::llamacpp::layer(cache), {0}, {0, 1, 2});
}

// Two blocks of a row by ggml's definition: code j in the low half of byte j, code j + 16 in the
// high half, a number is (code - 8) * d.
TEST(EngineAdapters, ReadAndWriteLlamaCppsQ4_0Blocks) {
  constexpr int kCells = 3;
  constexpr int kLong = 64;
  constexpr size_t kRowBytes = kLong / 32 * 18;
  std::vector<uint8_t> k(kCells * kHeads * kRowBytes);
  std::vector<float> expected;
  for (size_t block = 0; block < k.size() / 18; ++block) {
    const bool is_negative = block % 2 == 1;
    k[block * 18 + 1] = is_negative ? 0xB8 : 0x38;  // d is 0.5 or -0.5
    for (size_t j = 0; j < 32; ++j) {
      const size_t code = (block + 5 * j) % 16;
      k[block * 18 + 2 + j % 16] |= static_cast<uint8_t>(j < 16 ? code : code << 4);
      expected.push_back((static_cast<float>(code) - 8.0f) * (is_negative ? -0.5f : 0.5f));
    }
  }
  std::vector<uint8_t> v = k;
  api::llamacpp::Cache cache;
  cache.k = k.data();
  cache.v = v.data();
  cache.type_k = cache.type_v = api::llamacpp::Type::kQ4_0;
  cache.num_kv_heads = kHeads;
  cache.head_dim_k = cache.head_dim_v = kLong;
  cache.kv_size = kCells;
  const auto layer = api::llamacpp::layer(cache);
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  const OneSequence sequence({0}, kCells);
  std::vector<float> k_rows(expected.size());
  std::vector<float> v_rows(expected.size());
  ASSERT_EQ(gather_rows(*layer->get(), sequence, k_rows, v_rows), KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(k_rows, expected);
  EXPECT_EQ(v_rows, expected);

  // Every block has a code 0, so that the same numbers give the same bytes.
  const std::vector<uint8_t> before = k;
  std::ranges::fill(k, uint8_t{0xEE});
  ASSERT_EQ(append_rows(*layer->get(), expected, expected, {0, 1, 2}), KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(k, before);

  cache.v_trans = true;
  EXPECT_THAT(api::llamacpp::layer(cache).failure().text,
              HasSubstr("v is q4_0; expected head_dim"));
}

TEST(EngineAdapters, ReadTurboMindsBlocksByPointers) {
  std::vector<uint8_t> a(2 * 2 * 2 * kBlockTokens * (kDim + 4));
  std::vector<uint8_t> b(a.size());
  const std::vector<void*> pointers = {b.data(), a.data()};
  const api::turbomind::Geometry geometry{
      KVX_TURBOMIND_MODE_INT8, KVX_DTYPE_F16, 2, kHeads, kDim, kBlockTokens};
  const auto pools = api::turbomind::Pools::of_pointers(geometry, pointers);
  ASSERT_TRUE(pools.ok()) << pools.failure().text;
  ASSERT_EQ(pools->block_sizes()->block_bytes, a.size());
  const auto ids = pools->block_ids(pointers);
  ASSERT_TRUE(ids.ok()) << ids.failure().text;
  const auto layer = pools->layer(1);
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  const OneSequence sequence(*ids, 11);
  const std::vector<float> rows = test_rows(11, kHeads, kDim, 0.3f);
  ASSERT_EQ(append_rows(*layer->get(), rows, rows, slots_of(sequence, kBlockTokens)), KVX_STATUS_OK)
      << kvx_last_error();
  std::vector<float> k(rows.size());
  std::vector<float> v(rows.size());
  ASSERT_EQ(gather_rows(*layer->get(), sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_LT(largest_difference(k, rows), 0.02);
}

TEST(EngineAdapters, OwnTurboMindsPools) {
  const api::turbomind::Geometry geometry{
      KVX_TURBOMIND_MODE_FP4_MX, KVX_DTYPE_F16, 2, kHeads, 32, kBlockTokens};
  auto owned = api::turbomind::OwnedPools::create(geometry, {6, 0});
  ASSERT_TRUE(owned.ok()) << owned.failure().text;
  const auto ids = owned->allocate(3);
  ASSERT_TRUE(ids.ok()) << ids.failure().text;
  EXPECT_EQ(owned->facts()->num_free, 3);
  const auto layer = owned->pools().layer(1);
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  const OneSequence sequence(*ids, 11);
  const std::vector<float> rows = test_rows(11, kHeads, 32, 0.3f);
  ASSERT_EQ(append_rows(*layer->get(), rows, rows, slots_of(sequence, kBlockTokens)), KVX_STATUS_OK)
      << kvx_last_error();
  const auto table = owned->pointers(*ids);
  ASSERT_TRUE(table.ok()) << table.failure().text;
  auto probe = sized<kvx_turbomind_probe_t>();
  ASSERT_EQ(kvx_turbomind_probe(&owned->pools().get(), table->block_ptrs.data(),
                                table->scale_block_ptrs.data(), 3, 1, 1, 9, 0, nullptr, &probe),
            KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_NE(probe.k_scale0, 0);
  EXPECT_TRUE(owned->release(*ids).ok());
  EXPECT_EQ(owned->facts()->num_free, 6);
  EXPECT_THAT(api::turbomind::OwnedPools::create(geometry, {}).failure().text,
              HasSubstr("expected one of the two"));
  EXPECT_EQ(owned->allocate(-1).failure().status, KVX_STATUS_INVALID_ARGUMENT);
}

TEST(EngineAdapters, NameTheEnginesFieldInErrors) {
  std::vector<float> memory(64);
  const Tensor flat{memory.data(), KVX_DTYPE_F32, {64}};
  EXPECT_THAT(api::vllm::layer({flat}).failure().text, HasSubstr("kv_cache has 1 dimensions"));
  const Tensor f8{memory.data(), KVX_DTYPE_F8_E4M3, {1, 1, 4, 8}};
  EXPECT_THAT(api::vllm::layer({f8}).failure().text, HasSubstr("kv_cache is F8 and has no scale"));
  EXPECT_THAT(api::flashinfer::layer(Tensor{}, api::flashinfer::KvLayout::kNhd).failure().text,
              HasSubstr("paged_kv_cache has dtype 0"));
  const Tensor slots{memory.data(), KVX_DTYPE_F32, {8, 2, 4}};
  EXPECT_THAT(api::sglang::layer(slots, slots, 3).failure().text, HasSubstr("page_size is 3"));
  api::trtllm::Pool pool{{memory.data(), KVX_DTYPE_F32, {2, 1, 2, 16}}, 1, 4, 4};
  EXPECT_THAT(api::trtllm::layer(pool, 1).failure().text, HasSubstr("layer_idx_in_pool is 1"));
  EXPECT_THAT(api::llamacpp::layer({}).failure().text, HasSubstr("expected 1 or more"));
}

}  // namespace
}  // namespace kvx::api_test::adapters_test
