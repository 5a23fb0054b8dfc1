// attend against the double-precision reference: every format and head_dim, and random mixtures of
// features and shapes, on every CPU level of this machine.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/support/attend_scene.hpp"

namespace kvx::tests {
namespace {

// On every level of this machine.
void expect_near_reference(AttendScene& scene, double tolerance = kFloatTolerance) {
  const AttendOutput expected = scene.reference();
  for (CpuLevel level : cpu_levels_here()) {
    const AttendOutput got = scene.run(level);
    EXPECT_LE(relative_rms(got.out, expected.out), tolerance) << device::name_of(level);
    for (size_t i = 0; i < expected.lse.size(); ++i) {
      EXPECT_NEAR(got.lse[i], expected.lse[i], tolerance * (1 + std::abs(expected.lse[i])))
          << "lse[" << i << "] at " << device::name_of(level);
    }
  }
}

struct HeadDims {
  int key;
  int value;
};

class EveryFormat : public testing::TestWithParam<std::tuple<const format::Facts*, HeadDims>> {};

TEST_P(EveryFormat, IsAttendedAsTheReferenceSays) {
  const auto [facts, dims] = GetParam();
  SceneOptions options;
  options.runs = {{2, std::string(facts->name), std::string(facts->name)}};
  options.key_dim = dims.key;
  options.value_dim = dims.value;
  options.q_per_kv = 3;
  options.seq_lens = {0, 1, 37, 90, 70, 21};
  options.q_lens = {0, 1, 1, 90, 5, 0};
  AttendScene scene(options);
  expect_near_reference(scene, tolerance_of(options.runs));
}

// All head_dims that the format can store.
std::vector<std::tuple<const format::Facts*, HeadDims>> formats_and_dims() {
  std::vector<std::tuple<const format::Facts*, HeadDims>> cases;
  for (const format::Facts* facts : format::kRowFacts) {
    for (const HeadDims dims : {HeadDims{64, 64},
                                {80, 80},
                                {96, 96},
                                {128, 128},
                                {192, 192},
                                {256, 256},
                                {64, 128},
                                {192, 128},
                                {576, 512}}) {
      const bool fits =
          dims.key % facts->head_dim_multiple == 0 && dims.value % facts->head_dim_multiple == 0;
      if (fits) cases.emplace_back(facts, dims);
    }
  }
  return cases;
}

std::string case_name(const testing::TestParamInfo<EveryFormat::ParamType>& test) {
  const HeadDims dims = std::get<1>(test.param);
  return fmt::format("{}_{}_{}", std::get<0>(test.param)->name, dims.key, dims.value);
}

INSTANTIATE_TEST_SUITE_P(Attend, EveryFormat, testing::ValuesIn(formats_and_dims()), case_name);

TEST(Attend, HandlesHeadDimsThatFillNoVector) {
  for (int dim : {1, 3, 17, 40, 100, 1024}) {
    SceneOptions options;
    options.key_dim = dim;
    options.value_dim = dim == 1024 ? 1024 : dim + 2;
    options.seq_lens = {29, 40};
    options.q_lens = {29, 1};
    AttendScene scene(options);
    expect_near_reference(scene);
  }
}

TEST(Attend, HandlesEveryBlockSize) {
  for (int block_size : {1, 3, 16, 64, 1024}) {
    SceneOptions options;
    options.runs = {{2, "int8", "int4"}};
    options.block_size = block_size;
    options.seq_lens = {150, 65};
    options.q_lens = {20, 1};
    AttendScene scene(options);
    expect_near_reference(scene, kCodeTolerance);
  }
}

TEST(Attend, ReadsKeysAndValuesOfDifferentFormatsInRunsOfHeads) {
  SceneOptions options;
  options.runs = {{1, "int8", "nvfp4"}, {2, "bf16", "fp8_e4m3"}, {1, "int4_affine", "f32"}};
  options.seq_lens = {75, 33};
  options.q_lens = {12, 1};
  AttendScene scene(options);
  expect_near_reference(scene, kCodeTolerance);
}

TEST(Attend, TakesAndGivesSixteenBitFloats) {
  for (DType type : {DType::kF16, DType::kBF16}) {
    SceneOptions options;
    options.q_type = options.out_type = type;
    options.seq_lens = {75};
    options.q_lens = {12};
    AttendScene scene(options);
    const double half_ulp = type == DType::kF16 ? 0x1p-11 : 0x1p-8;
    expect_near_reference(scene, half_ulp);
  }
}

TEST(Attend, KeepsItsAccuracyOverThousandsOfTokens) {
  SceneOptions options;
  options.runs = {{1, "int8", "int8"}};
  options.block_size = 64;
  options.seq_lens = {6000};
  options.q_lens = {2};
  AttendScene scene(options);
  expect_near_reference(scene, kCodeTolerance);
}

TEST(Attend, StandsLargeScores) {
  SceneOptions options;
  options.softmax_scale = 20.0f;
  options.seq_lens = {90};
  options.q_lens = {30};
  AttendScene scene(options);
  // A score near 1000 carries 6e-5 of f32 rounding, and so does its probability.
  expect_near_reference(scene, 1e-4);
}

RC_GTEST_PROP(Attend, AgreesWithTheReferenceWhateverTheFeatures, ()) {
  const std::string formats[] = {"f32",  "bf16",        "f16",         "fp8_e4m3", "int8",
                                 "int4", "int8_affine", "int4_affine", "nvfp4"};
  const auto any_format = [&] { return formats[*rc::gen::inRange(0, 9)]; };
  const auto coin = [] { return *rc::gen::arbitrary<bool>(); };
  SceneOptions options;
  options.runs = {{*rc::gen::inRange(1, 3), any_format(), any_format()}};
  if (coin()) options.runs.push_back({1, any_format(), any_format()});
  options.key_dim = 16 * *rc::gen::inRange(1, 9);
  options.value_dim = 16 * *rc::gen::inRange(1, 9);
  options.q_per_kv = *rc::gen::inRange(1, 10);
  options.block_size = *rc::gen::inRange(1, 40);
  options.seq_lens.clear();
  options.q_lens.clear();
  for (int s = *rc::gen::inRange(1, 4); s > 0; --s) {
    options.seq_lens.push_back(*rc::gen::inRange(0, 150));
    options.q_lens.push_back(*rc::gen::inRange(0, std::min(options.seq_lens.back(), 20) + 1));
  }
  options.order = *rc::gen::element(RowOrder::kNhd, RowOrder::kHnd, RowOrder::kFused);
  options.softcap = coin() ? 2.0f : 0.0f;
  options.window = coin() ? *rc::gen::inRange(1, 100) : 0;
  options.window_sinks = options.window > 0 && coin() ? *rc::gen::inRange(1, 60) : 0;
  options.sinks = coin();
  options.k_mean = coin();
  options.k_factor = coin();
  options.k_offset = coin();
  options.k_hadamard = coin();
  options.v_mean = coin();
  options.v_factor = coin();
  options.v_hadamard = coin();
  options.full_precision_format = coin() ? "bf16" : "";
  options.num_sink_blocks = *rc::gen::inRange(0, 3);
  options.first_recent_block = *rc::gen::inRange(0, 4);
  AttendScene scene(options);
  const double tolerance = tolerance_of(options.runs);
  const AttendOutput expected = scene.reference();
  for (CpuLevel level : cpu_levels_here()) {
    const AttendOutput got = scene.run(level);
    RC_ASSERT(relative_rms(got.out, expected.out) <= tolerance);
    for (size_t i = 0; i < got.lse.size(); ++i) {
      const double bound = tolerance * (1 + std::abs(expected.lse[i]));
      RC_ASSERT(std::abs(got.lse[i] - expected.lse[i]) <= bound);
    }
  }
}

}  // namespace
}  // namespace kvx::tests
