// Saturation: the numbers that a static scale clips are counted, and no others.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/cpu_levels.hpp"
#include "tests/support/test_layer.hpp"

namespace kvx::ops::ops_saturation_test {
namespace {

using device::CpuLevel;
using format::FormatSpec;
using tests::Order;
using tests::TestSide;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

FormatSpec spec_of(const char* format, format::ScaleSource source,
                   format::ScaleChoice choice = format::ScaleChoice::kAmax) {
  const FormatSpec preferred = format::make_spec(format::format_named(format).value()).value();
  return format::make_spec(*preferred.facts, {preferred.group_size, preferred.scale_type,
                                              preferred.scale_rule, source, choice})
      .value();
}

// Saturated numbers of rows [rows.size() / head_dim, head_dim] at a level. feedback: [head_dim,
// head_dim], or null.
int64_t saturated(CpuLevel level, const FormatSpec& spec, int head_dim,
                  const std::vector<float>& rows, float scale, float tensor_scale = 1.0f,
                  const float* feedback = nullptr) {
  const int n = static_cast<int>(rows.size()) / head_dim;
  TestSide side(spec, head_dim, 1, n, 1, Order::kNhd);
  side.fill_scales(format::round_scale(spec.scale_type, scale));
  int64_t count = 0;
  cpu::EncodeParams params = {&spec,
                              head_dim,
                              tensor_scale,
                              rows.data(),
                              0,
                              n,
                              side.codes.data(),
                              side.view.codes.token_stride,
                              side.scales.data(),
                              side.view.scales.token_stride,
                              side.view.scales.group_stride};
  params.saturated = &count;
  params.feedback = feedback;
  cpu::kernel_table(level).of(spec).encode_rows(params);
  return count;
}

class Saturation : public testing::TestWithParam<CpuLevel> {};

TEST_P(Saturation, OfAGivenScaleIsWhatLiesBeyondHalfASpacing) {
  struct Case {
    const char* format;
    float last;    // the largest number that is not saturated under a step of 1
    float beyond;  // a little more
  };
  for (const Case& one : {Case{"int8", 127.5f, 127.6f}, Case{"int4", 7.5f, 7.6f},
                          Case{"fp8_e4m3", 464.0f, 465.0f}, Case{"fp8_e5m2", 61440.0f, 62000.0f}}) {
    const FormatSpec spec = spec_of(one.format, format::ScaleSource::kGiven);
    for (const int head_dim : {64, 72}) {  // whole parts, and not
      if (!format::check_head_dim(spec, head_dim).ok()) continue;
      std::vector<float> rows(3 * head_dim, one.last);
      EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f), 0) << one.format;
      rows[5] = one.beyond;
      rows[head_dim + 9] = -one.beyond;
      rows[3 * head_dim - 1] = 2 * one.beyond;
      EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f), 3) << one.format;
      rows[7] = kInfinity;  // not finite: another counter's
      rows[head_dim] = std::nanf("");
      EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f), 3) << one.format;
      EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 4.0f), 0) << one.format;
    }
  }
}

TEST_P(Saturation, OfAComputedScaleIsNone) {
  std::vector<float> rows(4 * 64);
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] = std::ldexp(i % 2 ? 1.0f : -1.0f, static_cast<int>(i % 16));
  for (const char* format : {"int8", "int4", "fp8_e4m3", "mxfp4"}) {
    const FormatSpec spec = spec_of(format, format::ScaleSource::kComputed);
    EXPECT_EQ(saturated(GetParam(), spec, 64, rows, 1.0f), 0) << format;
  }
}

// E4M3 scales end at 448: under a tensor scale of 1 no number beyond 448 * 7 can be stored.
TEST_P(Saturation, OfNvfp4IsWhatItsLargestScaleCannotReach) {
  for (const auto choice : {format::ScaleChoice::kAmax, format::ScaleChoice::kSearch}) {
    const FormatSpec spec = spec_of("nvfp4", format::ScaleSource::kComputed, choice);
    for (const int head_dim : {64, 48}) {
      std::vector<float> rows(9 * head_dim, 3136.0f);
      EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f), 0);
      rows[1] = 3200.0f;
      rows[4 * head_dim + 20] = -1e6f;
      rows[4 * head_dim + 21] = 1e30f;
      EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f), 3);
      EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f, 1.0f / 2), 9 * head_dim);
      rows[2 * head_dim] = kInfinity;
      std::fill(rows.begin() + 6 * head_dim, rows.begin() + 7 * head_dim, 0.0f);
      EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f), 3);
    }
  }
}

// An error of 0.4 times a weight of 5 moves the next number, 126, beyond 127.5.
TEST_P(Saturation, WithErrorFeedbackIsOfTheNumbersThatAreRounded) {
  const FormatSpec spec = spec_of("int8", format::ScaleSource::kGiven);
  for (const int head_dim : {64, 72}) {
    std::vector<float> weights(static_cast<size_t>(head_dim) * head_dim);
    weights[1] = 5.0f;  // of number 0's error, to number 1
    std::vector<float> rows(6 * head_dim);
    rows[0] = 0.4f, rows[1] = 126.0f;
    rows[head_dim] = -0.4f, rows[head_dim + 1] = 128.0f;  // moved back within the codes
    rows[2 * head_dim + 1] = 128.0f;                      // moved by nothing
    rows[3 * head_dim] = 0x1p61f;                         // too large for feedback
    rows[4 * head_dim] = kInfinity, rows[4 * head_dim + 5] = 300.0f;
    EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f, 1.0f, weights.data()), 4);
    EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f), 4);
    std::fill(rows.begin() + head_dim, rows.end(), 0.0f);
    EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f, 1.0f, weights.data()), 1);
    EXPECT_EQ(saturated(GetParam(), spec, head_dim, rows, 1.0f), 0);
  }
}

TEST_P(Saturation, WithErrorFeedbackOfAComputedScaleIsWhatItsLargestCannotReach) {
  const FormatSpec spec = spec_of("nvfp4", format::ScaleSource::kComputed);
  std::vector<float> weights(64 * 64);
  weights[2 * 64 + 3] = 1000.0f;  // of number 2's error, to number 3
  std::vector<float> rows(5 * 64, 3000.0f);
  EXPECT_EQ(saturated(GetParam(), spec, 64, rows, 1.0f, 1.0f, weights.data()), 5);
  EXPECT_EQ(saturated(GetParam(), spec, 64, rows, 1.0f), 0);
}

INSTANTIATE_TEST_SUITE_P(Levels, Saturation, testing::ValuesIn(tests::cpu_levels_here()),
                         tests::level_test_name);

}  // namespace
}  // namespace kvx::ops::ops_saturation_test
