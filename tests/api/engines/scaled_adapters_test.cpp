// kvx/engines/*.hpp, caches with scales beside their codes: layouts filled element by element by
// their public definitions, read by gather.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kvx/engines/trtllm.hpp"
#include "kvx/engines/vllm.hpp"
#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::scaled_adapters_test {
namespace {

using api::Layer;
using api::engines::Tensor;
using testing::HasSubstr;

constexpr int kBlocks = 5;
constexpr int kTokens = 8;
constexpr int kHeads = 2;
constexpr int kDim = 32;
constexpr int kGroups = kDim / 16;
constexpr int kRowBytes = kDim / 2;
constexpr int kWhole = kRowBytes + kGroups;

// E2M1 and E4M3 numbers that tell places apart.
constexpr std::array<float, 16> kE2m1 = {0,  0.5f,  1,  1.5f,  2,  3,  4,  6,
                                         -0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr std::array<std::pair<uint8_t, float>, 4> kE4m3 = {
    {{0x30, 0.5f}, {0x38, 1}, {0x40, 2}, {0x44, 3}}};

struct Place {
  int block, token, head;
  bool is_v;
};

uint8_t code_of(const Place& at, int dim) {
  return static_cast<uint8_t>(
      (at.block * 7 + at.token * 5 + at.head * 3 + dim + (at.is_v ? 9 : 0)) % 16);
}

std::pair<uint8_t, float> scale_of(const Place& at, int group) {
  return kE4m3[static_cast<size_t>(at.block + at.token + 2 * at.head + group + (at.is_v ? 1 : 0)) %
               4];
}

float number(const Place& at, int dim) {
  return kE2m1[code_of(at, dim)] * scale_of(at, dim / 16).second;
}

// Writes codes at codes_of(place) and scales at scales_of(place, group).
template <class CodesOf, class ScalesOf>
void fill(CodesOf codes_of, ScalesOf scales_of) {
  for (int b = 0; b < kBlocks; ++b) {
    for (int t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        for (const bool is_v : {false, true}) {
          const Place at{b, t, h, is_v};
          uint8_t* row = codes_of(at);
          for (int i = 0; i < kRowBytes; ++i) {
            row[i] = static_cast<uint8_t>(code_of(at, 2 * i) | code_of(at, 2 * i + 1) << 4);
          }
          for (int g = 0; g < kGroups; ++g) *scales_of(at, g) = scale_of(at, g).first;
        }
      }
    }
  }
}

// Gathers the table's blocks; number_of(place, dim) is what must be there.
template <class NumberOf>
void expect_rows(const api::Result<Layer>& layer, const std::vector<int32_t>& ids,
                 const std::vector<int>& blocks, NumberOf number_of) {
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  const OneSequence sequence(ids, static_cast<int32_t>(blocks.size()) * kTokens);
  std::vector<float> k(blocks.size() * kTokens * kHeads * kDim);
  std::vector<float> v(k.size());
  ASSERT_EQ(gather_rows(*layer->get(), sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
  size_t i = 0;
  for (const int block : blocks) {
    for (int t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        for (int d = 0; d < kDim; ++d, ++i) {
          ASSERT_EQ(k[i], number_of(Place{block, t, h, false}, d)) << block << " " << t << " " << h;
          ASSERT_EQ(v[i], number_of(Place{block, t, h, true}, d)) << block << " " << t << " " << h;
        }
      }
    }
  }
}

constexpr float kTensorScale = 0.25f;
constexpr std::array<float, kHeads> kScales = {kTensorScale, kTensorScale};

float scaled(const Place& at, int dim) {
  return number(at, dim) * kTensorScale;
}

// vLLM's page: [K codes][K scales][V codes][V scales].
struct VllmPages {
  explicit VllmPages(bool hnd, bool is_swizzled) : is_hnd(hnd), memory(kBlocks * kPage) {
    fill([&](const Place& at) { return side(at) + row(at) * kRowBytes; },
         [&](const Place& at, int group) {
           const bool turned = is_swizzled && at.is_v;
           const int token = turned ? swizzled(at.token, group) / kGroups : at.token;
           const int place = turned ? swizzled(at.token, group) % kGroups : group;
           return side(at) + kHeads * kTokens * kRowBytes +
                  row({at.block, token, at.head, at.is_v}) * kGroups + place;
         });
  }

  // Index of a scale among those of its head.
  static int swizzled(int token, int group) {
    return token / 4 * 4 * kGroups + group * 4 + token % 4;
  }

  uint8_t* side(const Place& at) {
    return memory.data() + at.block * kPage + (at.is_v ? kPage / 2 : 0);
  }
  int row(const Place& at) const {
    return is_hnd ? at.head * kTokens + at.token : at.token * kHeads + at.head;
  }

  api::vllm::Nvfp4Cache cache() {
    const int64_t head = is_hnd ? kTokens * kWhole : kWhole;
    const int64_t token = is_hnd ? kWhole : 2 * kHeads * kWhole;
    return {{memory.data(),
             KVX_DTYPE_U8,
             {kBlocks, 2 * kHeads, kTokens, kWhole},
             {kPage, head, token, 1}},
            kDim,
            kScales.data(),
            kScales.data()};
  }

  static constexpr int kPage = 2 * kHeads * kTokens * kWhole;
  bool is_hnd;
  std::vector<uint8_t> memory;
};

TEST(ScaledEngineAdapters, ReadVllmsNvfp4Pages) {
  for (const bool is_hnd : {false, true}) {
    VllmPages pages(is_hnd, false);
    expect_rows(api::vllm::nvfp4_layer(pages.cache()), {4, 1}, {4, 1}, scaled);
  }
}

TEST(ScaledEngineAdapters, TurnVllmsSwizzledScalesAndTurnThemBack) {
  for (const bool is_hnd : {false, true}) {
    VllmPages pages(is_hnd, true);
    const std::vector<uint8_t> before = pages.memory;
    const auto scales = api::vllm::nvfp4_v_scales(pages.cache());
    ASSERT_TRUE(scales.ok()) << scales.failure().text;
    ASSERT_TRUE(api::engines::nvfp4::linear_scales(*scales).ok());
    EXPECT_EQ(pages.memory, VllmPages(is_hnd, false).memory);
    expect_rows(api::vllm::nvfp4_layer(pages.cache()), {0, 3}, {0, 3}, scaled);
    ASSERT_TRUE(api::engines::nvfp4::swizzled_scales(*scales).ok());
    EXPECT_EQ(pages.memory, before);
  }
}

constexpr int kLayers = 3;
constexpr int kLayer = 1;

// TensorRT-LLM's pools, [blocks, layers, 2, heads, tokens, row], of which one layer is filled.
struct TrtPools {
  explicit TrtPools(bool is_swizzled)
      : codes(kBlocks * kLayers * 2 * kHeads * kTokens * kRowBytes),
        scales(kBlocks * kLayers * 2 * kHeads * kTokens * kGroups) {
    fill(
        [&](const Place& at) { return codes.data() + (head(at) * kTokens + at.token) * kRowBytes; },
        [&](const Place& at, int group) {
          const int place = is_swizzled && at.is_v ? VllmPages::swizzled(at.token, group)
                                                   : at.token * kGroups + group;
          return scales.data() + head(at) * kTokens * kGroups + place;
        });
  }

  static int head(const Place& at) {
    return ((at.block * kLayers + kLayer) * 2 + (at.is_v ? 1 : 0)) * kHeads + at.head;
  }

  api::trtllm::Nvfp4Pool pool() {
    api::trtllm::Nvfp4Pool pool;
    pool.codes.data = {
        codes.data(), KVX_DTYPE_U8, {kBlocks, kLayers, 2, kHeads * kTokens * kRowBytes}};
    pool.codes.num_kv_heads = kHeads;
    pool.codes.tokens_per_block = kTokens;
    pool.codes.head_dim = kDim;
    pool.scales = {scales.data(), KVX_DTYPE_U8, {kBlocks, kLayers, 2, kHeads * kTokens * kGroups}};
    pool.k_scales = pool.v_scales = kScales.data();
    return pool;
  }

  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
};

int32_t index_of(int block) {
  return static_cast<int32_t>(api::trtllm::block_index(block, kLayers));
}

TEST(ScaledEngineAdapters, ReadTensorRtsNvfp4Pools) {
  TrtPools pools(false);
  expect_rows(api::trtllm::nvfp4_layer(pools.pool(), kLayer), {index_of(4), index_of(1)}, {4, 1},
              scaled);
}

TEST(ScaledEngineAdapters, TurnTensorRtsSwizzledScales) {
  TrtPools pools(true);
  const std::vector<uint8_t> before = pools.scales;
  const auto scales = api::trtllm::nvfp4_v_scales(pools.pool(), kLayer);
  ASSERT_TRUE(scales.ok()) << scales.failure().text;
  ASSERT_TRUE(api::engines::nvfp4::linear_scales(*scales).ok());
  EXPECT_EQ(pools.scales, TrtPools(false).scales);
  ASSERT_TRUE(api::engines::nvfp4::swizzled_scales(*scales).ok());
  EXPECT_EQ(pools.scales, before);
}

TEST(ScaledEngineAdapters, WriteWhatVllmReads) {
  VllmPages pages(false, false);
  const auto layer = api::vllm::nvfp4_layer(pages.cache());
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  const OneSequence sequence({2, 0}, 11);
  const std::vector<float> rows = test_rows(11, kHeads, kDim, 0.3f);
  ASSERT_EQ(append_rows(*layer->get(), rows, rows, slots_of(sequence, kTokens)), KVX_STATUS_OK)
      << kvx_last_error();
  // Token 0 is that of block 2, its head 1: the definition gives its numbers within half a step of
  // E2M1's coarsest, 1 of 6.
  const uint8_t* codes = pages.side({2, 0, 1, false}) + pages.row({2, 0, 1, false}) * kRowBytes;
  const uint8_t* scales = pages.side({2, 0, 1, false}) + kHeads * kTokens * kRowBytes +
                          pages.row({2, 0, 1, false}) * kGroups;
  for (int d = 0; d < kDim; ++d) {
    const uint8_t scale = scales[d / 16];  // E4M3, positive and normal
    const float factor = std::ldexp(1 + static_cast<float>(scale & 7) / 8, (scale >> 3) - 7);
    const float found = kE2m1[codes[d / 2] >> (d % 2 * 4) & 15] * factor * kTensorScale;
    EXPECT_NEAR(found, rows[static_cast<size_t>(kDim + d)], factor * kTensorScale) << d;
  }
}

// vLLM's [K: codes][scale: f32][V: codes][scale: f32] of int8 or E4M3 codes.
struct PerTokenHead {
  explicit PerTokenHead(bool int8) : is_int8(int8), memory(kBlocks * kHeads * kTokens * 2 * kSide) {
    for (int i = 0; i < kBlocks * kTokens * kHeads * 2; ++i) {
      const Place at{i / 2 / kHeads / kTokens, i / 2 / kHeads % kTokens, i / 2 % kHeads,
                     i % 2 == 1};
      uint8_t* row = memory.data() +
                     ((at.block * kHeads + at.head) * kTokens + at.token) * 2 * kSide +
                     (at.is_v ? kSide : 0);
      for (int d = 0; d < kDim; ++d) {
        row[d] =
            is_int8 ? static_cast<uint8_t>(code_of(at, d) - 8) : kE4m3[code_of(at, d) % 4].first;
      }
      const float scale = row_scale(at);
      std::memcpy(row + kDim, &scale, sizeof scale);
    }
  }

  static float row_scale(const Place& at) {
    return 0.5f + static_cast<float>(at.block + at.token + at.head) + (at.is_v ? 0.25f : 0.0f);
  }
  float number(const Place& at, int dim) const {
    const float code =
        is_int8 ? static_cast<float>(code_of(at, dim) - 8) : kE4m3[code_of(at, dim) % 4].second;
    return code * row_scale(at);
  }

  static constexpr int kSide = kDim + static_cast<int>(sizeof(float));
  bool is_int8;
  std::vector<uint8_t> memory;
};

TEST(ScaledEngineAdapters, ReadVllmsCachesWithAScaleForEachTokenAndHead) {
  for (const bool is_int8 : {false, true}) {
    PerTokenHead cache(is_int8);
    const Tensor kv_cache{
        cache.memory.data(), KVX_DTYPE_U8, {kBlocks, kHeads, kTokens, 2 * PerTokenHead::kSide}};
    const auto format = is_int8 ? KVX_FORMAT_INT8 : KVX_FORMAT_FP8_E4M3;
    expect_rows(api::vllm::per_token_head_layer(kv_cache, format), {4, 1}, {4, 1},
                [&](const Place& at, int dim) { return cache.number(at, dim); });
  }
}

TEST(ScaledEngineAdapters, NameTheEnginesFieldInErrors) {
  VllmPages pages(false, false);
  api::vllm::Nvfp4Cache cache = pages.cache();
  cache.head_dim = 40;
  EXPECT_THAT(api::vllm::nvfp4_layer(cache).failure().text, HasSubstr("head_dim is 40"));
  cache = pages.cache();
  cache.kv_cache.shape[1] = 3;
  EXPECT_THAT(api::vllm::nvfp4_layer(cache).failure().text, HasSubstr("kv_cache has 3 heads"));
  cache = pages.cache();
  cache.kv_cache.stride[2] += 1;
  EXPECT_THAT(api::vllm::nvfp4_v_scales(cache).failure().text, HasSubstr("gaps in a page"));
  EXPECT_THAT(
      api::vllm::per_token_head_layer(pages.cache().kv_cache, KVX_FORMAT_INT4).failure().text,
      HasSubstr("expected KVX_FORMAT_INT8 or KVX_FORMAT_FP8_E4M3"));

  TrtPools pools(false);
  api::trtllm::Nvfp4Pool pool = pools.pool();
  EXPECT_THAT(api::trtllm::nvfp4_layer(pool, 3).failure().text,
              HasSubstr("layer_idx_in_pool is 3"));
  pool.scales.shape[3] += 1;
  EXPECT_THAT(api::trtllm::nvfp4_layer(pool, 0).failure().text,
              HasSubstr("scale_pool has another"));
  pool = pools.pool();
  pool.scales.shape[0] = 1;
  EXPECT_THAT(api::trtllm::nvfp4_layer(pool, 0).failure().text,
              HasSubstr("scale_pool has other blocks"));
  auto scales = *api::vllm::nvfp4_v_scales(pages.cache());
  scales.tokens = 6;
  EXPECT_THAT(api::engines::nvfp4::linear_scales(scales).failure().text,
              HasSubstr("args.block_size is 6; expected a multiple of 4"));
}

TEST(TurnScales, NamesTheFieldThatIsWrong) {
  std::vector<uint8_t> memory(8 * 8);
  auto args = sized<kvx_turn_scales_args_t>();
  args.order = KVX_SCALE_ORDER_LINEAR;
  args.scales = memory.data();
  args.num_blocks = args.num_heads = 1;
  args.block_size = 8;
  args.num_groups = 8;
  args.token_stride = 8;
  ASSERT_EQ(kvx_turn_scales(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  const auto refused = [&](auto kvx_turn_scales_args_t::*field, auto value, const char* text) {
    kvx_turn_scales_args_t wrong = args;
    wrong.*field = value;
    EXPECT_EQ(kvx_turn_scales(&wrong, nullptr), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(kvx_last_error(), HasSubstr(text));
  };
  refused(&kvx_turn_scales_args_t::order, 3u, "args.order is 3");
  refused(&kvx_turn_scales_args_t::scales, nullptr, "args.scales is null");
  refused(&kvx_turn_scales_args_t::num_heads, 0u, "num_heads 0");
  refused(&kvx_turn_scales_args_t::num_blocks, -1, "args.num_blocks is -1");
  refused(&kvx_turn_scales_args_t::num_groups, 65u, "args.num_groups is 65; expected 1 to 64");
  refused(&kvx_turn_scales_args_t::token_stride, 7, "args.token_stride is 7");
  refused(&kvx_turn_scales_args_t::token_stride, INT64_MIN,
          "args has a stride of -9223372036854775808");
  refused(&kvx_turn_scales_args_t::token_stride, INT64_MAX / 4, "within 64-bit addresses");
  refused(&kvx_turn_scales_args_t::memory, 9u, "args.memory is 9");
}

}  // namespace
}  // namespace kvx::api_test::scaled_adapters_test
