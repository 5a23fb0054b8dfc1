// The fast precision: what it promises, that it is taken where it is wanted, and that it holds with
// every feature.
#include <gtest/gtest.h>

#include "tests/support/attend_scene.hpp"

namespace kvx::tests::precision_test {
namespace {

// What ops/attend/precision.hpp promises. Rows of 16 and 8 bits that are floats are as exact as in
// the accurate precision.
constexpr double kFastTolerance = 8e-3;

double fast_tolerance_of(const format::Facts& facts) {
  const bool is_integer = facts.element.find("INT") != std::string_view::npos;
  const bool has_codes = is_integer || facts.element_bits < 8;
  return has_codes ? kFastTolerance : tolerance_of(std::string(facts.name));
}

SceneOptions decode_scene(const std::string& format, int dim) {
  SceneOptions options;
  options.runs = {{1, format, format}};
  options.key_dim = options.value_dim = dim;
  options.softmax_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  options.q_per_kv = 4;
  options.block_size = 64;
  options.seq_lens = {1000};
  return options;
}

// 46 new tokens of a head with three query heads: 138 rows, which fill no tile.
SceneOptions prompt_scene(const std::string& format, int dim) {
  SceneOptions options = decode_scene(format, dim);
  options.q_per_kv = 3;
  options.seq_lens = {300};
  options.q_lens = {46};
  return options;
}

class EveryFormatPrompt : public testing::TestWithParam<const format::Facts*> {};

TEST_P(EveryFormatPrompt, StaysWithinBothPromises) {
  for (int dim : {32, 64, 128, 256}) {
    AttendScene scene(prompt_scene(std::string(GetParam()->name), dim));
    const AttendOutput expected = scene.reference();
    for (CpuLevel level : cpu_levels_here()) {
      scene.args().precision = ops::Precision::kAccurate;
      const double accurate = relative_rms(scene.run(level).out, expected.out);
      scene.args().precision = ops::Precision::kFast;
      const double fast = relative_rms(scene.run(level).out, expected.out);
      EXPECT_LE(accurate, tolerance_of(std::string(GetParam()->name)))
          << device::name_of(level) << ", " << dim;
      EXPECT_LE(fast, fast_tolerance_of(*GetParam())) << device::name_of(level) << ", " << dim;
      RecordProperty(fmt::format("{}_{}", device::name_of(level), dim),
                     fmt::format("{:.1e} {:.1e}", accurate, fast));
    }
  }
}

class EveryFormatFast : public testing::TestWithParam<const format::Facts*> {};

TEST_P(EveryFormatFast, StaysWithinItsPromise) {
  for (int dim : {64, 128, 256}) {
    AttendScene scene(decode_scene(std::string(GetParam()->name), dim));
    const AttendOutput expected = scene.reference();
    scene.args().precision = ops::Precision::kFast;
    for (CpuLevel level : cpu_levels_here()) {
      const double error = relative_rms(scene.run(level).out, expected.out);
      EXPECT_LE(error, fast_tolerance_of(*GetParam())) << device::name_of(level) << ", " << dim;
      RecordProperty(fmt::format("{}_{}", device::name_of(level), dim),
                     fmt::format("{:.1e}", error));
    }
  }
}

std::string format_name(const testing::TestParamInfo<const format::Facts*>& test) {
  return std::string(test.param->name);
}
INSTANTIATE_TEST_SUITE_P(Attend, EveryFormatFast, testing::ValuesIn(format::kRowFacts),
                         format_name);
INSTANTIATE_TEST_SUITE_P(Attend, EveryFormatPrompt, testing::ValuesIn(format::kRowFacts),
                         format_name);

TEST(AttendFast, TakesQueriesOfEightBitsWhereCodesAreMultipliedAsIntegers) {
  for (CpuLevel level :
       {CpuLevel::kAvxVnni, CpuLevel::kAvx512, CpuLevel::kNeon, CpuLevel::kDotProd}) {
    if (!device::supports(level)) continue;  // no other level has such kernels
    for (const char* format : {"int8", "int4", "int4_affine", "nvfp4"}) {
      AttendScene scene(decode_scene(format, 128));
      const AttendOutput accurate = scene.run(level);
      scene.args().precision = ops::Precision::kFast;
      EXPECT_GT(relative_rms(scene.run(level).out, accurate.out), kCodeTolerance);
    }
  }
}

TEST(AttendFast, HoldsWithTransformsWindowsAndFullPrecisionWindow) {
  SceneOptions options = decode_scene("int8", 128);
  options.runs = {{1, "int8", "int4"}, {1, "nvfp4", "int8_affine"}, {1, "mxfp4", "fp8_e4m3"}};
  options.seq_lens = {300, 77};
  options.q_lens = {3, 1};
  options.softcap = 20.0f;
  options.window = 200;
  options.window_sinks = 16;
  options.sinks = true;
  options.k_mean = options.k_factor = options.k_hadamard = true;
  options.v_mean = options.v_factor = options.v_hadamard = true;
  options.full_precision_format = "bf16";
  AttendScene scene(options);
  const AttendOutput expected = scene.reference();
  scene.args().precision = ops::Precision::kFast;
  for (CpuLevel level : cpu_levels_here()) {
    EXPECT_LE(relative_rms(scene.run(level).out, expected.out), kFastTolerance)
        << device::name_of(level);
  }
}

}  // namespace
}  // namespace kvx::tests::precision_test
