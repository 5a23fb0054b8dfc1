// Tables from statistics: scales that clip nothing, percentiles that do, means and block offsets.
#include "tune/fit.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace kvx::tune::fit_test {
namespace {

using ::testing::Each;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kHeads = 2;
constexpr int kDim = 64;
constexpr int kRows = 1000;

// K of head h, channel d is h + 1 but for one row that is ten times as large; V is 0.5.
Statistics statistics_of(bool has_rope = true) {
  StatisticsConfig config;
  config.num_layers = 1;
  config.num_q_heads = 4;
  config.num_kv_heads = kHeads;
  config.k_head_dim = config.v_head_dim = kDim;
  if (has_rope) config.rope = kv::Rope{kv::RopePairs::kHalves, {0.5, 0.1}, 1.0};
  Statistics statistics = Statistics::create(config).value();
  std::vector<float> k;
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kHeads * kDim; ++c) {
      k.push_back(static_cast<float>(1 + c / kDim) * (r == 500 ? 10.0f : 1.0f));
    }
  }
  const std::vector<float> v(k.size(), 0.5f);
  std::vector<float> q(2 * k.size(), 1.0f);
  for (size_t i = 0; i < q.size(); i += 3) q[i] = 2;
  EXPECT_TRUE(statistics.feed(0, 0, kRows, k.data(), v.data()).ok());
  EXPECT_TRUE(statistics.feed_queries(0, 0, kRows, q.data()).ok());
  return statistics;
}

kv::LayerPlan plan_of(const char* recipe) {
  const kv::CacheGeometry geometry{1, kHeads, kDim, kDim};
  return kv::plan_layers(geometry, kv::parse_recipe(recipe).value(), {}).value().front();
}

kv::LayerCalibration scales_of(const char* recipe, const FitOptions& options) {
  kv::LayerCalibration tables;
  EXPECT_TRUE(fit_scales(statistics_of(), 0, options, plan_of(recipe), tables).ok());
  return tables;
}

TEST(Fit, GivenScalesReachTheMaximum) {
  FitOptions options;
  options.given_scales = true;
  const kv::LayerCalibration tables = scales_of("int8:source=given,g32", options);
  ASSERT_THAT(tables.k.group_scales, SizeIs(kHeads * 2));
  EXPECT_FLOAT_EQ(tables.k.group_scales[0], f16_to_f32(f32_to_f16(10.0f / 127)));
  EXPECT_FLOAT_EQ(tables.k.group_scales[3], f16_to_f32(f32_to_f16(20.0f / 127)));
  EXPECT_THAT(tables.v.group_scales, Each(FloatNear(0.5f / 127, 1e-5f)));
  EXPECT_THAT(tables.k.tensor_scales, IsEmpty());
}

TEST(Fit, APercentileClipsTheLargest) {
  FitOptions options;
  options.given_scales = true;
  options.percentile = 99;
  const kv::LayerCalibration tables = scales_of("fp8_e4m3", options);
  ASSERT_THAT(tables.k.group_scales, SizeIs(kHeads));
  EXPECT_NEAR(tables.k.group_scales[0], 1.0f / 448, 0.02f / 448);
  EXPECT_NEAR(tables.k.group_scales[1], 2.0f / 448, 0.04f / 448);
}

TEST(Fit, AGivenScaleOfAPowerOfTwoClipsNothing) {
  FitOptions options;
  options.given_scales = true;
  const kv::LayerCalibration tables = scales_of("mxfp4:source=given", options);
  for (const float scale : tables.k.group_scales) {
    EXPECT_EQ(std::exp2(std::round(std::log2(scale))), scale);
  }
  EXPECT_GE(6 * tables.k.group_scales.front(), 10.0f);
  EXPECT_LT(3 * tables.k.group_scales.front(), 10.0f);
}

TEST(Fit, TensorScalesFollowEitherRule) {
  FitOptions options;
  options.tensor_scales = TensorScaleRule::kAmaxBy448;
  EXPECT_FLOAT_EQ(scales_of("nvfp4", options).k.tensor_scales[1], 20.0f / 448);
  options.tensor_scales = TensorScaleRule::kAmaxBy6By448;
  EXPECT_FLOAT_EQ(scales_of("nvfp4", options).k.tensor_scales[1], 20.0f / (6 * 448));
}

TEST(Fit, AGroupOfZerosGetsAStep) {
  EXPECT_EQ(step_for(kv::parse_recipe("int8").value().k.spec, 1, 0), 1);
}

TEST(Fit, MeansAndOffsetsAreWhatTheOptionsName) {
  const Statistics statistics = statistics_of();
  FitOptions options;
  const kv::LayerPlan plan = plan_of("nvfp4:k.hadamard");
  const kv::LayerCalibration none = fit_tables(statistics, 0, options, plan).value();
  EXPECT_THAT(none.k_mean, IsEmpty());
  EXPECT_THAT(none.k_rope_mean, IsEmpty());
  EXPECT_THAT(none.k_feedback, IsEmpty());
  options.v_mean = options.k_block_offset = options.k_feedback = true;
  const kv::LayerCalibration all = fit_tables(statistics, 0, options, plan).value();
  EXPECT_THAT(all.v_mean, Each(0.5f));
  EXPECT_THAT(all.k_rope_mean, SizeIs(kHeads * kDim));
  EXPECT_EQ(all.k_rope, *statistics.config().rope);
  EXPECT_THAT(all.k_feedback, SizeIs(kHeads * kDim * kDim));
}

TEST(Fit, SixteenBitKeysGetNoFeedback) {
  FitOptions options;
  options.k_feedback = true;
  EXPECT_THAT(fit_tables(statistics_of(), 0, options, plan_of("bf16/int4")).value().k_feedback,
              IsEmpty());
}

TEST(Fit, FactorsKeepAHeadsNumbersWhereTheyWere) {
  FitOptions options;
  options.k_factor = true;
  const std::vector<float> factors =
      fit_tables(statistics_of(), 0, options, plan_of("int8")).value().k_factor;
  double sum = 0;
  for (int d = 0; d < kDim; ++d) sum += std::log(factors[d]);
  EXPECT_NEAR(sum, 0, 1e-4);
  EXPECT_GT(factors[0], factors[1]);  // queries are twice as large there
}

TEST(Fit, APercentileOutOfRangeIsRefused) {
  for (const double percentile : {0.0, -1.0, 100.5, std::nan("")}) {
    EXPECT_THAT(check_percentile(percentile).error().message, HasSubstr("percentile is"));
  }
  EXPECT_TRUE(check_percentile(100).ok());
}

}  // namespace
}  // namespace kvx::tune::fit_test
