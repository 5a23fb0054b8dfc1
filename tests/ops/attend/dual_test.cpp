// Dual-scale blocks at every CPU level, held to double precision over what gather reads of them.
#include <gtest/gtest.h>

#include "tests/support/attend_scene.hpp"

namespace kvx::tests::dual_test {
namespace {

constexpr double kFastTolerance = 8e-3;  // what ops/attend/precision.hpp promises
constexpr const char* kDualFormats[] = {"int4_dual", "int3_dual", "int2_dual"};

SceneOptions options_of(const char* k, const char* v, int head_dim, int block_size) {
  SceneOptions options;
  options.runs = {{2, k, v}};
  options.key_dim = options.value_dim = head_dim;
  options.softmax_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  options.order = RowOrder::kRecord;
  options.block_size = block_size;
  options.q_per_kv = 4;
  options.seq_lens = {0, 1, 37, 300, 130, 64, 128};
  options.q_lens = {0, 1, 1, 1, 1, 1, 1};
  return options;
}

void expect_within_promises(const SceneOptions& options) {
  AttendScene scene(options);
  const AttendOutput expected = scene.reference();
  for (const CpuLevel level : cpu_levels_here()) {
    scene.args().precision = ops::Precision::kAccurate;
    const double accurate = relative_rms(scene.run(level).out, expected.out);
    scene.args().precision = ops::Precision::kFast;
    const double fast = relative_rms(scene.run(level).out, expected.out);
    const std::string of = fmt::format("{}_{}_{}_{}", device::name_of(level),
                                       options.runs[0].k_format, options.key_dim, options.q_per_kv);
    EXPECT_LE(accurate, kCodeTolerance) << of;
    EXPECT_LE(fast, kFastTolerance) << of;
    testing::Test::RecordProperty(of, fmt::format("{:.1e} {:.1e}", accurate, fast));
  }
}

TEST(AttendDual, EveryPairAndHeadDimStaysWithinBothPromises) {
  for (const char* k : kDualFormats) {
    for (const char* v : kDualFormats) {
      for (const int head_dim : {64, 128, 192, 256}) {
        SCOPED_TRACE(fmt::format("{}/{}, head_dim {}", k, v, head_dim));
        expect_within_promises(options_of(k, v, head_dim, 64));
      }
    }
  }
}

// Rows that fill no chunk of four, and those of prompts.
TEST(AttendDual, AnyNumberOfRowsMeetsBlocksOfBothSizes) {
  for (const char* format : kDualFormats) {
    for (const int q_per_kv : {1, 3, 7}) {
      for (const int block_size : {64, 128}) {
        SCOPED_TRACE(fmt::format("{}, {} rows, blocks of {}", format, q_per_kv, block_size));
        SceneOptions options = options_of(format, format, 128, block_size);
        options.q_per_kv = q_per_kv;
        options.seq_lens = {300, 150};
        options.q_lens = {1, 46};
        expect_within_promises(options);
      }
    }
  }
}

// By tokens and heads the rows of a head lie apart. The sixth of three heads' ends where sixteen
// rows side by side would, and so does the fourth of five heads'.
TEST(AttendDual, RowsOfSeveralHeadsAreNotSideBySide) {
  for (const char* format : kDualFormats) {
    for (const auto& [num_heads, num_in_last_tile] : {std::pair(3, 6), std::pair(5, 4)}) {
      SCOPED_TRACE(fmt::format("{}, {} heads", format, num_heads));
      SceneOptions options = options_of(format, format, 128, 64);
      options.runs[0].num_heads = num_heads;
      options.order = RowOrder::kNhd;
      options.scales_apart = true;
      options.seq_lens = {64 + num_in_last_tile, 200};
      options.q_lens = {1, 1};
      expect_within_promises(options);
    }
  }
}

TEST(AttendDual, TransformsWindowsAndSinksHold) {
  for (const char* format : kDualFormats) {
    SceneOptions options = options_of(format, format, 128, 64);
    options.seq_lens = {300, 77};
    options.q_lens = {3, 1};
    options.softcap = 20.0f;
    options.window = 200;
    options.window_sinks = 16;
    options.sinks = true;
    options.k_mean = options.k_factor = options.k_hadamard = true;
    options.v_mean = options.v_factor = options.v_hadamard = true;
    expect_within_promises(options);
  }
}

// Bytes that quantising never writes, as a file may have them: a NaN in a tile's middle, and what
// comes of it at the scalar level.
void expect_the_same_nans(AttendScene& scene, uint8_t* byte) {
  *byte = 0x7F;
  const AttendOutput expected = scene.run(CpuLevel::kScalar);
  int num_nans = 0;
  for (const CpuLevel level : cpu_levels_here()) {
    const AttendOutput got = scene.run(level);
    ASSERT_EQ(got.out.size(), expected.out.size());
    num_nans = 0;
    for (size_t i = 0; i < got.out.size(); ++i) {
      num_nans += std::isnan(expected.out[i]) ? 1 : 0;
      ASSERT_EQ(std::isnan(got.out[i]), std::isnan(expected.out[i]))
          << device::name_of(level) << ", " << i;
      if (std::isnan(got.out[i])) continue;
      ASSERT_NEAR(got.out[i], expected.out[i], 1e-3);
    }
  }
  EXPECT_GT(num_nans, 0);
  EXPECT_LT(num_nans, static_cast<int>(expected.out.size()));
}

TEST(AttendDual, NaNAmongStepsAndScalesReachesWhatReadsIt) {
  for (const char* format : kDualFormats) {
    SceneOptions options = options_of(format, format, 128, 64);
    options.seq_lens = {200};
    options.q_lens = {1};
    for (const bool is_key : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", format, is_key ? "K" : "V"));
      const auto side_of = [is_key](AttendScene& scene) -> const ops::SideView& {
        const auto& run = scene.packed().view().runs.front();
        return is_key ? run.k : run.v;
      };
      AttendScene of_step(options);
      expect_the_same_nans(of_step, side_of(of_step).channels.at(of_step.table()[1], 0) + 100);
      AttendScene of_scale(options);
      expect_the_same_nans(of_scale, side_of(of_scale).scales.at(of_scale.table()[1], 9, 0));
    }
  }
}

}  // namespace
}  // namespace kvx::tests::dual_test
