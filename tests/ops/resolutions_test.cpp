// What the formats' rules resolve where the standards leave a choice (docs/numbers.md), one test
// each. Exactness of encoding is in tests/format/exact_encode_test.cpp, page-shared scales in
// page_shared_test.cpp.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "format/list.hpp"
#include "tests/support/store_row.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::resolutions_test {
namespace {

using namespace kvx::tests;  // NOLINT: builders
using format::ScaleSource;
using format::ScaleType;
using testing::Each;
using testing::ElementsAre;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> row_of(int n, float first) {
  std::vector<float> row(n, 0.0f);
  row[0] = first;
  return row;
}

TEST(Resolutions, C12AnAllZeroGroupsScaleByteIsZero) {
  for (const char* name : {"mxfp4_g16", "mxfp4", "nvfp4"}) {
    const StoredRow row = store_row(spec_named(name), std::vector<float>(32, 0.0f));
    EXPECT_THAT(row.scales, Each(0)) << name;
    EXPECT_THAT(row.codes, Each(0)) << name;
    EXPECT_THAT(row.back, Each(0.0f)) << name;
  }
}

TEST(Resolutions, C13ANonfiniteInputMakesItsGroupNanInEveryFormat) {
  for (const format::Facts* facts : format::kRowFacts) {
    const auto spec = computed_spec(*facts);
    for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
      std::vector<float> x = normal_floats(128, 1);
      x[100] = bad;
      const StoredRow row = store_row(spec, x);
      EXPECT_EQ(row.nonfinite, 0) << "the scale is NaN, which counts as expressed";
      const int length = format::group_length(spec, 128);
      for (int i = 0; i < 128; ++i) {
        const bool is_in_group = i / length == 100 / length;
        EXPECT_EQ(std::isfinite(row.back[i]), !is_in_group) << facts->name << " dim " << i;
      }
    }
  }
}

TEST(Resolutions, C13TheNanScalesAreTheTypesOwn) {
  std::vector<float> x(32, 1.0f);
  x[3] = kNan;
  EXPECT_EQ(store_row(spec_named("mxfp4"), x).scales[0], 0xFF);
  EXPECT_EQ(store_row(spec_named("nvfp4"), x).scales[0], 0x7F);
  EXPECT_THAT(store_row(spec_named("int8"), x).scales, ElementsAre(0x00, 0x7E));
  EXPECT_THAT(store_row(spec_named("int4_affine"), x).scales, ElementsAre(0, 0x7E, 0, 0x7E));
}

TEST(Resolutions, C13IntegersUnderAGivenScaleCountWhatTheyCannotSay) {
  std::vector<float> x(32, 1.0f);
  x[3] = kNan;
  x[4] = -kInfinity;
  for (const char* name : {"int8", "int4", "nvfp4", "fp4_row", "int4_row"}) {
    const auto spec = spec_named(name, {.scale_source = ScaleSource::kGiven});
    const StoredRow row = store_row(spec, x, 1.0f, format::round_scale(spec.scale_type, 1.0f));
    EXPECT_EQ(row.nonfinite, 2) << name;
    EXPECT_EQ(row.back[3], 0.0f) << name;
    EXPECT_EQ(row.back[4], 0.0f) << name;
    EXPECT_EQ(row.back[5], 1.0f) << name;
  }
  const StoredRow e4m3 =
      store_row(spec_named("fp8_e4m3"), x, 1.0f, {std::bit_cast<uint32_t>(1.0f)});
  EXPECT_EQ(e4m3.nonfinite, 0);
  EXPECT_TRUE(std::isnan(e4m3.back[3]) && std::isnan(e4m3.back[4]));
  const StoredRow e5m2 =
      store_row(spec_named("fp8_e5m2"), x, 1.0f, {std::bit_cast<uint32_t>(1.0f)});
  EXPECT_TRUE(std::isnan(e5m2.back[3]));
  EXPECT_EQ(e5m2.back[4], -kInfinity);
}

TEST(Resolutions, C14TheSmallestAndLargestExponentBytesAreNumbers) {
  const auto spec = spec_named("mxfp4");
  EXPECT_EQ(store_row(spec, row_of(32, 0x1p-149f)).scales[0], 0);
  const std::vector<float> finite = row_of(32, 0x1.8p127f);
  EXPECT_EQ(store_row(spec, finite).scales[0], 127 + 125);
  EXPECT_EQ(store_row(spec, finite).back, finite);
  // 4 * 2^126 is above FLT_MAX: the byte is still a number's, and what comes back is visible.
  const StoredRow largest = store_row(spec, row_of(32, std::numeric_limits<float>::max()));
  EXPECT_EQ(largest.scales[0], 127 + 126);
  EXPECT_EQ(largest.back[0], kInfinity);
}

TEST(Resolutions, C15CodesAreMadeWithTheRoundedScale) {
  // amax / 6 = 1.0833 rounds to 1.125 in E4M3; 5 / 1.125 = 4.44 is code 4, 5 / 1.0833 = 4.6 also;
  // 2.75 / 1.125 = 2.44 is code 2, where 2.75 / 1.0833 = 2.54 would be 3.
  std::vector<float> x = row_of(16, 6.5f);
  x[1] = 2.75f;
  const StoredRow row = store_row(spec_named("nvfp4"), x);
  EXPECT_EQ(row.scales[0], 0x39);
  EXPECT_EQ(row.back[1], 2 * 1.125f);
}

TEST(Resolutions, C16BothTensorScaleHelpersAndTheirRefusals) {
  EXPECT_EQ(format::tensor_scale_for_kv(448.0f).value(), 1.0f);
  EXPECT_EQ(format::tensor_scale_for_weights(2688.0f).value(), 1.0f);
  for (const float bad : {0.0f, -1.0f, kNan, kInfinity}) {
    EXPECT_FALSE(format::tensor_scale_for_kv(bad).ok()) << bad;
    EXPECT_FALSE(format::tensor_scale_for_weights(bad).ok()) << bad;
  }
}

double relative_error(const std::vector<float>& x, const std::vector<float>& back) {
  double error = 0, power = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    error += (x[i] - back[i]) * static_cast<double>(x[i] - back[i]);
    power += static_cast<double>(x[i]) * x[i];
  }
  return error / power;
}

// Without the clamp a tenth of what amax is below 0.00586 vanished; with a tensor scale it is as
// good as any.
TEST(Resolutions, C17TinyGroupsDoNotVanishAndATensorScaleMakesThemExact) {
  const std::vector<float> x = normal_floats(1024, 3, 0.003f);
  const auto spec = spec_named("nvfp4");
  const StoredRow untuned = store_row(spec, x);
  EXPECT_THAT(untuned.scales, Each(testing::Ge(1)));
  EXPECT_LT(relative_error(x, untuned.back), 0.1);
  const float amax = 0.012f;
  const StoredRow tuned = store_row(spec, x, format::tensor_scale_for_kv(amax).value());
  EXPECT_LT(relative_error(x, tuned.back), 0.011);
}

TEST(Resolutions, C17ScalesSaturateAt448) {
  const StoredRow row = store_row(spec_named("nvfp4"), row_of(16, 1e6f));
  EXPECT_EQ(row.scales[0], 0x7E);
  EXPECT_EQ(row.back[0], 6 * 448.0f);
}

TEST(Resolutions, C18AZeroGroupIsNotDividedByItsScale) {
  std::vector<float> x = normal_floats(32, 1);
  for (int i = 0; i < 16; ++i) x[i] = i % 2 ? 0.0f : -0.0f;
  const StoredRow row = store_row(spec_named("nvfp4"), x);
  EXPECT_EQ(row.scales[0], 0);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(row.codes[i], 0);
}

TEST(Resolutions, C18bE4M3Saturates) {
  const auto one = format::StoredScale{std::bit_cast<uint32_t>(1.0f)};
  const StoredRow row = store_row(spec_named("fp8_e4m3"), {464.0f, 465.0f, 1e30f, -500.0f}, 1, one);
  EXPECT_THAT(row.back, ElementsAre(448.0f, 448.0f, 448.0f, -448.0f));
}

TEST(Resolutions, C19Fp4RoundsOnItsGridTiesToEven) {
  const std::vector<float> x = {6, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
  const StoredRow row = store_row(spec_named("fp4_row"), x);
  EXPECT_THAT(row.back, ElementsAre(6, 0, 1, 1, 2, 2, 4, 4));
}

TEST(Resolutions, C20Int4IsTwosComplementAndReadsMinusEight) {
  const auto spec = spec_named("int4_row");
  const StoredRow row = store_row(spec, {7, -7, -1, 0, 1, -3, 3, 2});
  EXPECT_THAT(row.codes, ElementsAre(0x97, 0x0F, 0xD1, 0x23));
  const uint8_t lowest = 0x88;
  std::vector<uint8_t> codes(4, lowest);
  const uint8_t scale[2] = {0x00, 0x3C};
  std::vector<float> back(8);
  const auto& kernels = cpu::kernel_table(device::CpuLevel::kScalar).of(spec);
  kernels.decode_rows({&spec, 8, 1.0f, format::DecodeFor::kGather, back.data(), 0, 1, codes.data(),
                       0, scale, 0, 2});
  EXPECT_THAT(back, Each(-8.0f));
}

TEST(Resolutions, C21AnF16ScaleSaturatesAndAnF32ScaleReachesFurther) {
  const std::vector<float> x = {1e6f, -1e6f, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(store_row(spec_named("fp4_row"), x).back[0], 6 * 65504.0f);
  const auto with_f32_scale = spec_named("fp4_row", {.scale_type = ScaleType::kF32});
  EXPECT_EQ(store_row(with_f32_scale, x).back[1], -1e6f);
  const std::vector<float> tiny = {1e-9f, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_THAT(store_row(spec_named("fp4_row"), tiny).scales, ElementsAre(1, 0)) << "not a zero";
  EXPECT_NEAR(store_row(with_f32_scale, tiny).back[0], 1e-9f, 1e-16);
}

TEST(Resolutions, C27AGivenScaleIsTheStep) {
  const auto spec =
      spec_named("int8", {.scale_type = ScaleType::kF32, .scale_source = ScaleSource::kGiven});
  const float step = 4.0f / 127;  // calibrated on amax 4
  const StoredRow row =
      store_row(spec, std::vector<float>(32, 1.0f), 1, {std::bit_cast<uint32_t>(step)});
  EXPECT_EQ(row.codes[0], 32);
  EXPECT_FLOAT_EQ(row.back[0], 32 * step);
}

TEST(Resolutions, C27Int4UsesSevenNotAHundredAndTwentySeven) {
  const StoredRow row = store_row(spec_named("int4"), std::vector<float>(64, 7.0f));
  EXPECT_THAT(row.scales, ElementsAre(0x00, 0x3C));
  EXPECT_THAT(row.codes, Each(0x77));
}

TEST(Resolutions, C28IntegersRoundTiesToEven) {
  std::vector<float> x(32, 0.5f);
  x[0] = 127;
  x[1] = 1.5f;
  x[2] = -2.5f;
  const StoredRow row = store_row(spec_named("int8"), x);
  EXPECT_EQ(row.codes[1], 2);
  EXPECT_EQ(row.codes[2], static_cast<uint8_t>(-2));
  EXPECT_EQ(row.codes[3], 0);
}

TEST(Resolutions, C28EveryElementOfAPartialLastGroupIsWritten) {
  const std::vector<float> x(80, 1.0f);
  for (const int group : {32, 64, 128}) {
    const StoredRow row = store_row(spec_named("int8", {.group_size = group}), x);
    EXPECT_EQ(row.scales.size(), size_t(2 * ((80 + group - 1) / group)));
    EXPECT_THAT(row.codes, Each(127)) << group;
  }
}

}  // namespace
}  // namespace kvx::ops::resolutions_test
