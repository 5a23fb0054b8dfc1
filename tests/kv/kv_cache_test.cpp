// The assembled cache: steps, full-precision window, layer groups, overrides and calibration,
// against plain attention in double precision.
#include "kv/kv_cache.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/kv/stream.hpp"

namespace kvx::kv::kv_cache_test {
namespace {

std::string creation_error(KvCacheConfig config) {
  const Result<std::unique_ptr<KvCache>> cache = KvCache::create(std::move(config), context());
  return cache.ok() ? "accepted" : cache.error().message;
}

// Plain causal attention in double precision; a query sees its own and the window - 1 tokens before
// it.
std::vector<float> plain_attention(const Stream& stream, int num_tokens, int window = 0) {
  std::vector<float> out(static_cast<size_t>(num_tokens) * kNumQHeads * kHeadDim);
  for (int t = 0; t < num_tokens; ++t) {
    for (int h = 0; h < kNumQHeads; ++h) {
      const int kv_head = h * kNumKvHeads / kNumQHeads;
      const float* q = &stream.q[(static_cast<size_t>(t) * kNumQHeads + h) * kHeadDim];
      const int first = window == 0 ? 0 : std::max(0, t - window + 1);
      std::vector<double> sum(kHeadDim, 0.0);
      double total = 0;
      for (int s = first; s <= t; ++s) {
        const size_t row = (static_cast<size_t>(s) * kNumKvHeads + kv_head) * kHeadDim;
        double dot = 0;
        for (int d = 0; d < kHeadDim; ++d) dot += double{q[d]} * stream.k[row + d];
        const double weight = std::exp(dot * 0.125);
        total += weight;
        for (int d = 0; d < kHeadDim; ++d) sum[d] += weight * stream.v[row + d];
      }
      for (int d = 0; d < kHeadDim; ++d) {
        out[(static_cast<size_t>(t) * kNumQHeads + h) * kHeadDim + d] =
            static_cast<float>(sum[d] / total);
      }
    }
  }
  return out;
}

// Attention in binary32; on a GPU with its own exponential.
double exact_tolerance() {
  return is_on_gpu() ? 1e-5 : 1e-6;
}

TEST(KvCache, AnF32CacheIsPlainAttention) {
  const Stream stream(100);
  auto cache = created(config_of("f32"));
  const int sequence = cache->create_sequence().value();
  EXPECT_LT(
      relative_rms(feed(*cache, sequence, stream, 0, 100, 1000), plain_attention(stream, 100)),
      exact_tolerance());
}

TEST(KvCache, FullPrecisionWindowOfF32AroundF32BlocksChangeNothing) {
  const Stream stream(150);
  auto cache = created(config_of("f32:sink=20,recent=30,full_precision=f32,hadamard"));
  const int sequence = cache->create_sequence().value();
  EXPECT_LT(
      relative_rms(feed(*cache, sequence, stream, 0, 150, 1000), plain_attention(stream, 150)),
      exact_tolerance());
}

TEST(KvCache, ASequenceMayBeNoLongerThanItsFullPrecisionWindow) {
  const Stream stream(60);
  KvCacheConfig config = config_of("nvfp4:sink=16,recent=64,full_precision=f32");
  config.max_tokens_per_sequence = 60;  // the packed pool has no blocks, so no memory
  auto cache = created(std::move(config));
  const int sequence = cache->create_sequence().value();
  EXPECT_LT(relative_rms(feed(*cache, sequence, stream, 0, 60, 1000), plain_attention(stream, 60)),
            exact_tolerance());
}

// Attention over codes may round queries and probabilities to 16 bits, a GPU's over bf16 to bf16.
double code_tolerance() {
  return is_on_gpu() ? 3.5e-3 : 1e-4;
}

TEST(KvCache, StepsGiveWhatTokenByTokenGives) {
  const Stream stream(130);
  for (const char* recipe :
       {"bf16", "int8", "nvfp4:auto", "int4:hadamard,sink=4,recent=40,full_precision=f16",
        "fp8_e4m3", "mxfp4:auto", "int4_affine:auto", "int8/int4:auto"}) {
    auto cache = created(config_of(recipe));
    const int steps = cache->create_sequence().value();
    const int tokens = cache->create_sequence().value();
    const std::vector<float> in_steps = feed(*cache, steps, stream, 0, 130, 1000);
    const std::vector<float> one_by_one = feed(*cache, tokens, stream, 0, 130, 1);
    EXPECT_LT(relative_rms(in_steps, one_by_one), code_tolerance()) << recipe;
    std::vector<float> k(130 * kNumKvHeads * kHeadDim), k_one_by_one(k.size());
    const MutableFloatRows none;
    for (int layer = 0; layer < kNumLayers; ++layer) {
      ASSERT_TRUE(gather(*cache, steps, layer, 0, 130,
                         dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim), none)
                      .ok());
      ASSERT_TRUE(gather(*cache, tokens, layer, 0, 130,
                         dense_rows(k_one_by_one.data(), DType::kF32, kNumKvHeads, kHeadDim), none)
                      .ok());
      EXPECT_EQ(k, k_one_by_one) << recipe << ", layer " << layer;
    }
  }
}

TEST(KvCache, FullPrecisionWindowKeepTheirTokensIn16BitsAndTheMiddlePacked) {
  const Stream stream(160);
  auto cache = created(config_of("int4:sink=10,recent=40,full_precision=f32", 16));
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 160, 7);
  std::vector<float> k(160 * kNumKvHeads * kHeadDim);
  ASSERT_TRUE(gather(*cache, sequence, 0, 0, 160,
                     dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim), {})
                  .ok());
  // 160 tokens are ten blocks: block 0 is the sink, 6 to 8 hold the 40 before any query in block 9.
  for (int token = 0; token < 160; ++token) {
    const bool is_full_precision = token < 16 || token >= 6 * 16;
    const size_t row = static_cast<size_t>(token) * kNumKvHeads * kHeadDim;
    const bool is_exact =
        std::equal(k.begin() + row, k.begin() + row + kHeadDim, stream.k.begin() + row);
    EXPECT_EQ(is_exact, is_full_precision) << "token " << token;
  }
}

TEST(KvCache, SequencesOfOneStepDoNotSeeEachOther) {
  const Stream a(60, 1), b(60, 2);
  for (const char* recipe : {"int8", "nvfp4:auto"}) {
    auto cache = created(config_of(recipe));
    const int alone_a = cache->create_sequence().value();
    const int alone_b = cache->create_sequence().value();
    const std::vector<float> expected_a = feed(*cache, alone_a, a, 0, 60, 16);
    const std::vector<float> expected_b = feed(*cache, alone_b, b, 0, 60, 16);
    ASSERT_TRUE(cache->free_sequence(alone_a).ok());
    ASSERT_TRUE(cache->free_sequence(alone_b).ok());
    const int first = cache->create_sequence().value();
    const int second = cache->create_sequence().value();
    feed(*cache, first, a, 0, 20, 16);
    feed(*cache, second, b, 0, 35, 16);

    const StepEntry entries[] = {{second, 1}, {first, 2}};
    ASSERT_TRUE(cache->begin_step(entries).ok());
    Stream both(3);
    const auto put = [](std::vector<float>& to, int to_row, const std::vector<float>& from,
                        int from_row, int count, int heads) {
      const int width = heads * kHeadDim;
      std::copy_n(from.begin() + from_row * width, count * width, to.begin() + to_row * width);
    };
    put(both.q, 0, b.q, 35, 1, kNumQHeads), put(both.q, 1, a.q, 20, 2, kNumQHeads);
    put(both.k, 0, b.k, 35, 1, kNumKvHeads), put(both.k, 1, a.k, 20, 2, kNumKvHeads);
    put(both.v, 0, b.v, 35, 1, kNumKvHeads), put(both.v, 1, a.v, 20, 2, kNumKvHeads);
    std::vector<float> out(3 * kNumQHeads * kHeadDim);
    ASSERT_TRUE(append_and_attend(*cache, 3, 0, params(), both.rows(both.q, kNumQHeads, 0),
                                  both.rows(both.k, kNumKvHeads, 0),
                                  both.rows(both.v, kNumKvHeads, 0),
                                  dense_rows(out.data(), DType::kF32, kNumQHeads, kHeadDim))
                    .ok());
    constexpr int width = kNumQHeads * kHeadDim;
    const auto expected_row = [](const std::vector<float>& rows, int row) {
      return std::vector<float>(rows.begin() + row * width, rows.begin() + (row + 1) * width);
    };
    EXPECT_LT(relative_rms(expected_row(out, 0), expected_row(expected_b, 35)), code_tolerance())
        << recipe;
    EXPECT_LT(relative_rms(expected_row(out, 1), expected_row(expected_a, 20)), code_tolerance())
        << recipe;
    EXPECT_LT(relative_rms(expected_row(out, 2), expected_row(expected_a, 21)), code_tolerance())
        << recipe;
  }
}

TEST(KvCache, ACancelledStepLeavesNoTokens) {
  const Stream stream(40), other(40, 2);
  auto cache = created(config_of("f32"));
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 20, 20);
  const StepEntry entry{sequence, 15};
  ASSERT_TRUE(cache->begin_step({&entry, 1}).ok());
  EXPECT_EQ(cache->truncate_sequence(sequence, 3).error().message,
            "a step is open with sequence 0; end or cancel it first");
  std::vector<float> ignored(15 * kNumQHeads * kHeadDim);
  ASSERT_TRUE(append_and_attend(*cache, 15, 0, params(), other.rows(other.q, kNumQHeads, 20),
                                other.rows(other.k, kNumKvHeads, 20),
                                other.rows(other.v, kNumKvHeads, 20),
                                dense_rows(ignored.data(), DType::kF32, kNumQHeads, kHeadDim))
                  .ok());
  ASSERT_TRUE(cache->cancel_step().ok());
  EXPECT_EQ(cache->cancel_step().error().message, "no step is open; begin one first");
  EXPECT_EQ(cache->num_tokens(sequence), 20);
  const std::vector<float> tail = feed(*cache, sequence, stream, 20, 40, 6);
  const std::vector<float> all = plain_attention(stream, 40);
  EXPECT_LT(relative_rms(tail, std::vector<float>(all.end() - tail.size(), all.end())),
            exact_tolerance());
}

TEST(KvCache, LayersWithAWindowSeeTheWindowAndGiveOldBlocksBack) {
  const Stream stream(200);
  KvCacheConfig config = config_of("f32");
  config.geometry.layer_windows = {24, 0};
  auto cache = created(config);
  const int sequence = cache->create_sequence().value();
  EXPECT_LT(
      relative_rms(feed(*cache, sequence, stream, 0, 200, 5), plain_attention(stream, 200, 24)),
      exact_tolerance());
  const cache::PoolAccount account = cache->account();
  ASSERT_EQ(account.classes.size(), 2u);
  EXPECT_LT(account.classes[0].used.total() * 3, account.classes[1].used.total());
}

TEST(KvCache, OverridesStoreTheirLayersAndHeadsApart) {
  const Stream stream(40);
  KvCacheConfig config = config_of("int4");
  config.overrides.push_back(parse_head_override("0:1=f32").value());
  config.overrides.push_back(parse_layer_override("1=f32").value());
  auto cache = created(config);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 40, 40);
  std::vector<float> k(40 * kNumKvHeads * kHeadDim);
  const MutableFloatRows rows = dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim);
  ASSERT_TRUE(gather(*cache, sequence, 1, 0, 40, rows, {}).ok());
  EXPECT_EQ(k, stream.k);
  ASSERT_TRUE(gather(*cache, sequence, 0, 0, 40, rows, {}).ok());
  for (int head : {0, 1}) {
    const bool is_exact = std::equal(k.begin() + head * kHeadDim, k.begin() + (head + 1) * kHeadDim,
                                     stream.k.begin() + head * kHeadDim);
    EXPECT_EQ(is_exact, head == 1);
  }
}

TEST(KvCache, CalibratedScalesAreReadFromTheirTable) {
  const Stream stream(20);
  KvCacheConfig config = config_of("int8:source=given");
  config.calibration.resize(kNumLayers);
  for (LayerCalibration& layer : config.calibration) {
    layer.k.group_scales = {0.03125f, 0.0625f};  // one group of 64 a head
    layer.v.group_scales = {0.03125f, 0.03125f};
  }
  auto cache = created(config);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 20, 20);
  std::vector<float> k(20 * kNumKvHeads * kHeadDim);
  ASSERT_TRUE(gather(*cache, sequence, 0, 0, 20,
                     dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim), {})
                  .ok());
  for (size_t i = 0; i < k.size(); ++i) {
    const float step = i / kHeadDim % kNumKvHeads == 0 ? 0.03125f : 0.0625f;
    EXPECT_EQ(k[i], std::nearbyint(std::clamp(stream.k[i] / step, -127.0f, 127.0f)) * step) << i;
  }
}

TEST(KvCache, CountsWhatGivenScalesCannotSay) {
  Stream stream(4);
  stream.k[5] = std::numeric_limits<float>::quiet_NaN();
  stream.v[70] = std::numeric_limits<float>::infinity();
  KvCacheConfig config = config_of("int8:source=given");
  config.calibration.resize(kNumLayers);
  for (LayerCalibration& layer : config.calibration) {
    layer.k.group_scales = layer.v.group_scales = {0.1f, 0.1f};
  }
  auto cache = created(config);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 4, 4);
  EXPECT_EQ(cache->nonfinite_inputs(), 2 * kNumLayers);
}

// Calibrated for numbers up to 12.7.
KvCacheConfig config_of_given(const char* recipe) {
  KvCacheConfig config = config_of(recipe);
  config.calibration.resize(kNumLayers);
  for (LayerCalibration& layer : config.calibration) {
    layer.k.group_scales = layer.v.group_scales = {0.1f, 0.1f};
  }
  return config;
}

TEST(KvCache, CountsWhatAStaticScaleClipsByLayerAndHead) {
  constexpr int kTokens = 64;  // four blocks
  Stream stream(kTokens);
  for (float& x : stream.k) x = std::clamp(x, -12.0f, 12.0f);
  for (float& x : stream.v) x = std::clamp(x, -12.0f, 12.0f);
  stream.k[5] = 100.0f;          // token 0, head 0
  stream.k[kHeadDim] = -100.0f;  // token 0, head 1
  stream.k[kHeadDim + 1] = 13.0f;
  stream.v[kNumKvHeads * kHeadDim + 3] = 1000.0f;  // token 1, head 0
  stream.v[4] = std::numeric_limits<float>::quiet_NaN();
  // Clipped on the way into a packed block, whether that is append's or a window's.
  for (const char* recipe : {"int8:source=given", "int8:source=given,recent=1"}) {
    auto cache = created(config_of_given(recipe));
    EXPECT_EQ(cache->saturated_inputs(), 0);
    feed(*cache, cache->create_sequence().value(), stream, 0, kTokens, 4);
    const std::vector<LayerCounts> layers = cache->head_counts().value();
    ASSERT_EQ(layers.size(), static_cast<size_t>(kNumLayers));
    for (const LayerCounts& layer : layers) {
      ASSERT_EQ(layer.k.size(), static_cast<size_t>(kNumKvHeads));
      EXPECT_EQ(layer.k[0].saturated, 1) << recipe;
      EXPECT_EQ(layer.k[1].saturated, 2) << recipe;
      EXPECT_EQ(layer.v[0].saturated, 1) << recipe;
      EXPECT_EQ(layer.v[1].saturated, 0) << recipe;
      EXPECT_EQ(layer.v[0].nonfinite, 1) << recipe;
      EXPECT_EQ(layer.k[0].nonfinite, 0) << recipe;
    }
    EXPECT_EQ(cache->saturated_inputs(), 4 * kNumLayers);
  }
}

TEST(KvCache, CountsHeadsOfAnOverrideWhereTheyAre) {
  Stream stream(4);
  for (float& x : stream.k) x = 1.0f;
  for (float& x : stream.v) x = 1.0f;
  stream.k[kHeadDim + 2] = 500.0f;  // head 1: the only one with E4M3 under a scale of 1
  KvCacheConfig config = config_of("int8");
  config.overrides = {parse_head_override("1:1=fp8_e4m3").value()};
  auto cache = created(config);
  feed(*cache, cache->create_sequence().value(), stream, 0, 4, 4);
  const std::vector<LayerCounts> layers = cache->head_counts().value();
  EXPECT_EQ(layers[1].k[1].saturated, 1);
  EXPECT_EQ(cache->saturated_inputs(), 1);
}

TEST(KvCache, ABudgetLimitsTheBlocksAndAFullPoolChangesNothing) {
  KvCacheConfig config = config_of("bf16");
  const auto whole = created(config);
  config.memory_budget_bytes = whole->account().allocated.total() / 2;  // room for one of two
  auto cache = created(config);
  const Stream stream(400);
  const int first = cache->create_sequence().value();
  const int second = cache->create_sequence().value();
  feed(*cache, first, stream, 0, 390, 100);
  const StepEntry entries[] = {{first, 5}, {second, 300}};
  const Status begun = cache->begin_step(entries);
  ASSERT_FALSE(begun.ok());
  EXPECT_EQ(begun.error().code, ErrorCode::kOutOfRange);
  EXPECT_NE(begun.error().message.find("blocks of group 0 packed"), std::string::npos);
  EXPECT_EQ(cache->num_tokens(first), 390);
  feed(*cache, first, stream, 390, 400, 10);

  config.memory_budget_bytes = 1000;
  EXPECT_NE(creation_error(config).find("bytes"), std::string::npos);
}

TEST(KvCache, ErrorsNameTheFieldTheValueAndWhatWasExpected) {
  const auto with = [](auto change) {
    KvCacheConfig config = config_of("int8");
    change(config);
    return creation_error(config);
  };
  EXPECT_EQ(with([](KvCacheConfig& c) { c.geometry.num_kv_heads = 0; }),
            "num_kv_heads is 0; expected 1 to 16384");
  EXPECT_NE(with([](KvCacheConfig& c) { c.block_size = 0; }).find("block_size is 0"),
            std::string::npos);
  EXPECT_NE(with([](KvCacheConfig& c) { c.max_tokens_per_sequence = 0; }).find("is 0; expected 1"),
            std::string::npos);
  EXPECT_EQ(with([](KvCacheConfig& c) {
              c.recipe = parse_recipe("mxfp4").value();
              c.geometry.k_head_dim = 80;
            }),
            "head_dim is 80; mxfp4 needs a multiple of 32");
  EXPECT_EQ(
      with([](KvCacheConfig& c) { c.overrides.push_back(parse_layer_override("7=bf16").value()); }),
      "layer is 7; the cache has layers 0 to 1");
  EXPECT_EQ(with([](KvCacheConfig& c) { c.recipe = parse_recipe("int8:source=given").value(); }),
            "layer 0 k_group_scales is missing; source=given needs 2 calibrated scales");
  EXPECT_EQ(with([](KvCacheConfig& c) {
              c.calibration.resize(kNumLayers);
              c.calibration[1].v_factor = std::vector<float>(kNumKvHeads * kHeadDim, 0.0f);
            }),
            "layer 1 v_factor[0] is 0; expected a positive finite number");
  EXPECT_NE(with([](KvCacheConfig& c) {
              c.recipe = parse_recipe("nvfp4").value();
              c.calibration.resize(kNumLayers);
              c.calibration[0].k.tensor_scales = {1.0f, -1.0f};
            }).find("k_tensor_scales[1] is -1"),
            std::string::npos);

  auto cache = created(config_of("int8:recent=16"));
  const int sequence = cache->create_sequence().value();
  const StepEntry none{sequence, 0};
  EXPECT_EQ(cache->begin_step({&none, 1}).error().message,
            "entries[0].num_tokens is 0; expected 1 to 400 in one step");
  const StepEntry beyond{sequence, 401};
  EXPECT_EQ(cache->begin_step({&beyond, 1}).error().message,
            "entries[0].num_tokens is 401; the sequence has 0 of 400 tokens");
  const StepEntry unknown{1, 1};
  EXPECT_EQ(cache->begin_step({&unknown, 1}).error().message,
            "entries[0].sequence is 1; it is not in use");
  EXPECT_FALSE(cache->end_step().ok());
  EXPECT_FALSE(cache->gather(sequence, 0, 0, 1, {}, {}).ok());
}

TEST(KvCache, CostsFollowFromTheFacts) {
  KvCacheConfig config = config_of("int8", 64);
  const RecipeCost cost = cost_of(config, 4096).value();
  EXPECT_DOUBLE_EQ(cost.bits_per_value, 8.25);
  EXPECT_DOUBLE_EQ(cost.bytes_per_token, kNumLayers * kNumKvHeads * 2 * (kHeadDim + 2.0));
  EXPECT_EQ(cost.tokens_per_gib, static_cast<int64_t>((1 << 30) / cost.bytes_per_token));
  config.recipe = parse_recipe("nvfp4:sink=16,recent=64").value();
  const RecipeCost full_precision = cost_of(config, 4096).value();
  EXPECT_DOUBLE_EQ(full_precision.bits_per_value, 4.5);
  // Of 64 blocks, the first and the last two are bf16.
  EXPECT_DOUBLE_EQ(full_precision.bytes_per_token,
                   kNumLayers * kNumKvHeads * 2 * (61 * 36.0 + 3 * 128.0) / 64);
}

}  // namespace
}  // namespace kvx::kv::kv_cache_test
