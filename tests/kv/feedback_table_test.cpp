// feedback_table: its weights against the definition, and what they do to scores' errors.
#include "kv/plan/feedback_table.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/support/verbs.hpp"

namespace kvx::kv {
namespace {

using namespace kvx::tests;  // NOLINT: builders
using testing::HasSubstr;

constexpr int kDim = 64;

// Queries whose channels go together, as after RoPE: a few directions carry most of them.
std::vector<double> correlated_moments(int num_heads, uint32_t seed) {
  constexpr int kDirections = 6;
  std::vector<double> moments(size_t(num_heads) * kDim * kDim);
  for (int head = 0; head < num_heads; ++head) {
    const std::vector<float> directions = normal_floats(kDirections * kDim, seed + head);
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j < kDim; ++j) {
        double sum = i == j ? 0.05 : 0;
        for (int d = 0; d < kDirections; ++d) {
          sum += double{directions[d * kDim + i]} * directions[d * kDim + j];
        }
        moments[(size_t(head) * kDim + i) * kDim + j] = sum;
      }
    }
  }
  return moments;
}

// The mean of d^T H d over rows, d = row - found; [tokens, heads, kDim].
double weighted_error(const std::vector<float>& rows, const std::vector<float>& found,
                      const std::vector<double>& moments, int num_heads) {
  double total = 0;
  for (size_t row = 0; row < rows.size() / kDim; ++row) {
    const double* of_head = moments.data() + row % num_heads * kDim * kDim;
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j < kDim; ++j) {
        const double di = rows[row * kDim + i] - found[row * kDim + i];
        const double dj = rows[row * kDim + j] - found[row * kDim + j];
        total += di * of_head[i * kDim + j] * dj;
      }
    }
  }
  return total / double(rows.size() / kDim);
}

// What comes back of K through a layer of the format, transformed and rounded.
std::vector<float> stored_keys(const char* format, const KvRows& rows, const LayerShape& shape,
                               const ops::SideTransform& transform, const float* feedback) {
  const auto spec = spec_named(format);
  TestLayer layer(spec, spec, shape);
  layer.k.view.feedback = feedback;
  if (spec.scale_source == format::ScaleSource::kGiven) {
    layer.k.fill_scales(format::round_scale(spec.scale_type, 0.02f));
  }
  const int num_tokens = static_cast<int>(rows.k.size()) / (shape.num_heads * kDim);
  const std::vector<int64_t> slots = slots_from(0, num_tokens);
  ops::AppendArgs append;
  append.cache = layer.view();
  append.transform.k = transform;
  append.k = dense_rows(rows.k.data(), DType::kF32, shape.num_heads, kDim);
  append.v = dense_rows(rows.v.data(), DType::kF32, shape.num_heads, kDim);
  append.slot_mapping = slots;
  const auto context = serial_context(device::CpuLevel::kScalar);
  EXPECT_TRUE(ops::append(context, append).ok());
  std::vector<float> keys(rows.k.size());
  std::vector<int32_t> ids(shape.num_blocks);
  std::iota(ids.begin(), ids.end(), 0);
  const ops::GatherRange range = {.num_tokens = num_tokens};
  ops::GatherArgs gather;
  gather.cache = layer.view();
  gather.transform.k = transform;
  gather.block_table = {ids.data(), shape.num_blocks};
  gather.max_blocks_per_sequence = shape.num_blocks;
  gather.num_sequences = 1;
  gather.ranges = {&range, 1};
  gather.k = dense_rows(keys.data(), DType::kF32, shape.num_heads, kDim);
  EXPECT_TRUE(ops::gather(context, gather).ok());
  return keys;
}

TEST(FeedbackTable, ScoresErrFarLessThanWithPlainRounding) {
  const LayerShape shape = {
      .num_blocks = 8, .block_size = 16, .num_heads = 2, .k_dim = kDim, .v_dim = kDim};
  const KvRows rows = normal_rows(shape, 128, 11);
  const std::vector<double> moments = correlated_moments(shape.num_heads, 21);
  std::vector<float> factor(shape.num_heads * kDim);
  for (size_t i = 0; i < factor.size(); ++i) factor[i] = 0.5f + static_cast<float>(i % 3);
  for (const char* format : {"nvfp4", "int4", "int8", "mxfp4", "fp8_e4m3", "int4_affine"}) {
    for (const bool is_transformed : {false, true}) {
      FeedbackInput input = {.num_kv_heads = 2, .head_dim = kDim, .moments = moments};
      ops::SideTransform transform;
      if (is_transformed) {
        input.factor = factor, transform.factor = factor.data();
        input.hadamard = transform.hadamard = true;
      }
      const std::vector<float> table = feedback_table(input).value();
      const auto error = [&](const float* feedback) {
        const auto found = stored_keys(format, rows, shape, transform, feedback);
        return weighted_error(rows.k, found, moments, shape.num_heads);
      };
      const double plain = error(nullptr);
      const double fed = error(table.data());
      EXPECT_LT(fed, plain / 2) << format << (is_transformed ? " transformed" : "");
    }
  }
}

// H = (I - W)^-1 D (I - W)^-T, so (I - W) H (I - W)^T is diagonal.
TEST(FeedbackTable, WeightsDiagonaliseTheMoments) {
  const std::vector<double> moments = correlated_moments(1, 3);
  const auto table =
      feedback_table({.num_kv_heads = 1, .head_dim = kDim, .moments = moments}).value();
  double mean = 0;
  for (int i = 0; i < kDim; ++i) mean += moments[i * kDim + i] / kDim;
  const auto damped = [&](int i, int j) {
    return moments[i * kDim + j] + (i == j ? 0.01 * mean : 0);
  };
  const auto of_errors = [&](int i, int j) { return (i == j ? 1.0 : 0.0) - table[i * kDim + j]; };
  for (int i = 0; i < kDim; ++i) {
    std::vector<double> row(kDim);
    for (int k = 0; k < kDim; ++k) {
      for (int j = i; j < kDim; ++j) row[k] += of_errors(i, j) * damped(j, k);
    }
    for (int other = 0; other < i; ++other) {
      double sum = 0;
      for (int k = other; k < kDim; ++k) sum += row[k] * of_errors(other, k);
      EXPECT_NEAR(sum, 0, 1e-4 * mean) << i << " " << other;
    }
  }
}

TEST(FeedbackTable, HeadsThatNoQueryMetGetNoFeedback) {
  const std::vector<double> zeros(kDim * kDim);
  const auto table =
      feedback_table({.num_kv_heads = 1, .head_dim = kDim, .moments = zeros}).value();
  EXPECT_EQ(table, std::vector<float>(kDim * kDim));
}

TEST(FeedbackTable, ErrorsNameTheFieldTheValueAndWhatWasExpected) {
  const std::vector<double> moments = correlated_moments(1, 3);
  const auto message = [&](auto change) {
    std::vector<double> changed = moments;
    FeedbackInput input = {.num_kv_heads = 1, .head_dim = kDim};
    change(changed, input);
    input.moments = changed;
    const auto table = feedback_table(input);
    return table.ok() ? std::string() : table.error().message;
  };
  EXPECT_EQ(message([](auto&, auto&) {}), "");
  EXPECT_THAT(message([](auto& m, auto&) { m.pop_back(); }),
              HasSubstr("moments has 4095 numbers; expected 4096 (1 heads of 64 x 64)"));
  EXPECT_THAT(message([](auto& m, auto&) { m[65] = std::nan(""); }),
              HasSubstr("moments[0][1][1] is nan; expected a finite number"));
  EXPECT_THAT(message([](auto& m, auto&) { m[1] += 1; }), HasSubstr("moments[0][0][1] is "));
  EXPECT_THAT(message([](auto& m, auto&) { m[0] = -1; }), HasSubstr("no diagonal below 0"));
  EXPECT_THAT(message([](auto&, auto& i) { i.damping = 0; }), HasSubstr("damping is 0"));
  EXPECT_THAT(message([](auto&, auto& i) { i.num_kv_heads = 0; }), HasSubstr("num_kv_heads is 0"));
  const std::vector<float> factor(kDim, -1.0f);
  EXPECT_THAT(message([&](auto&, auto& i) { i.factor = factor; }), HasSubstr("factor[0] is -1"));
}

}  // namespace
}  // namespace kvx::kv
