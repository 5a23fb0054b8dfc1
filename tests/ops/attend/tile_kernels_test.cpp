// The tile kernels of every CPU level against plain loops in double precision, at shapes that fill
// no vector, and the softmax state's rule of merging.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "ops/attend/cpu/tile_kernels.hpp"
#include "tests/support/attend_scene.hpp"

namespace kvx::tests::tile_kernels_test {
namespace {

using ops::SoftmaxState;
using ops::cpu::TileKernels;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class Levels : public testing::TestWithParam<CpuLevel> {
 protected:
  const TileKernels& kernels() const { return ops::cpu::tile_kernels(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(TileKernels, Levels, testing::ValuesIn(cpu_levels_here()),
                         level_test_name);

std::vector<float> random_floats(int n) {
  static std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(rng);
  return values;
}

TEST_P(Levels, AProductAddsEveryRowAndColumnAndTouchesNothingElse) {
  for (int rows : {1, 2, 3, 7, 8, 9, 32}) {
    for (int columns : {1, 4, 15, 33, 64}) {
      const int inner = 13, a_stride = 14, b_stride = columns + 3, c_stride = columns + 1;
      const std::vector<float> a = random_floats(rows * a_stride);
      const std::vector<float> b = random_floats(inner * b_stride);
      const std::vector<float> before = random_floats(rows * c_stride);
      std::vector<float> c = before;
      kernels().add_product(
          {a.data(), a_stride, b.data(), b_stride, c.data(), c_stride, rows, inner, columns});
      for (int r = 0; r < rows; ++r) {
        EXPECT_EQ(c[r * c_stride + columns], before[r * c_stride + columns]);
        for (int j = 0; j < columns; ++j) {
          double expected = before[r * c_stride + j];
          for (int k = 0; k < inner; ++k) {
            expected += double{a[r * a_stride + k]} * b[k * b_stride + j];
          }
          EXPECT_NEAR(c[r * c_stride + j], expected, 1e-5);
        }
      }
    }
  }
}

TEST_P(Levels, ATransposeMovesEveryNumber) {
  for (int rows : {1, 3, 4, 15, 16, 29}) {
    for (int columns : {1, 5, 16, 80}) {
      const int stride = rows + 2;
      const std::vector<float> source = random_floats(rows * columns);
      std::vector<float> target(columns * stride, -1.0f);
      kernels().transpose(source.data(), rows, columns, target.data(), stride);
      for (int c = 0; c < columns; ++c) {
        for (int r = 0; r < stride; ++r) {
          EXPECT_EQ(target[c * stride + r], r < rows ? source[r * columns + c] : -1.0f);
        }
      }
    }
  }
}

TEST_P(Levels, ADotProductTakesEveryElementOnce) {
  for (int n : {1, 7, 16, 31, 100}) {
    const std::vector<float> a = random_floats(n), b = random_floats(n);
    double expected = 0;
    for (int i = 0; i < n; ++i) expected += double{a[i]} * b[i];
    EXPECT_NEAR(kernels().dot(a.data(), b.data(), n), expected, 1e-5);
  }
}

TEST_P(Levels, AllFiniteFindsOneBadNumberAnywhere) {
  for (int n : {1, 16, 37}) {
    std::vector<float> values(n, 3e38f);
    EXPECT_TRUE(kernels().all_finite(values.data(), n));
    for (float bad : {kInfinity, -kInfinity, std::nanf("")}) {
      for (int i = 0; i < n; ++i) {
        values[i] = bad;
        EXPECT_FALSE(kernels().all_finite(values.data(), n));
        values[i] = -3e38f;
      }
    }
  }
}

TEST_P(Levels, ExpIsAccurateOverItsWholeRange) {
  // Scores from 0 down to -86, with a maximum of 0.
  std::vector<float> scores(64 * 1000);
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = -86.0f * static_cast<float>(i) / 64000.0f;
  std::vector<float> p = scores;
  SoftmaxState state;
  kernels().absorb_scores(p.data(), static_cast<int>(p.size()), state, nullptr, 0);
  for (size_t i = 0; i < p.size(); ++i) {
    const double expected = std::exp(double{scores[i]});
    ASSERT_NEAR(p[i], expected, 2.5e-7 * expected) << "exp(" << scores[i] << ")";
  }
}

TEST_P(Levels, ExpOfVeryNegativeScoresIsZeroAndNanStaysNan) {
  std::vector<float> scores = {0.0f, -88.0f, -1000.0f, -kInfinity, std::nanf(""), -3e38f};
  SoftmaxState state;
  kernels().absorb_scores(scores.data(), 6, state, nullptr, 0);
  EXPECT_EQ(scores[0], 1.0f);
  for (int i : {1, 2, 3, 5}) EXPECT_EQ(scores[i], 0.0f);
  EXPECT_TRUE(std::isnan(scores[4]) && std::isnan(state.sum));
}

TEST_P(Levels, SoftcapFollowsTanhAtEveryMagnitude) {
  const float cap = 30.0f;
  std::vector<float> scores;
  for (float x = 1e-6f; x < 1e4f; x *= 1.01f) {
    scores.push_back(x);
    scores.push_back(-x);
  }
  scores.push_back(0.0f);
  std::vector<float> capped = scores;
  kernels().scale_scores(capped.data(), static_cast<int>(capped.size()), 0.0f, 1.0f, cap);
  for (size_t i = 0; i < scores.size(); ++i) {
    const double expected = cap * std::tanh(double{scores[i]} / cap);
    ASSERT_NEAR(capped[i], expected, 4e-7 * std::abs(expected)) << "score " << scores[i];
  }
}

TEST_P(Levels, ScoresAreBiasedBeforeTheyAreScaled) {
  std::vector<float> scores(21, 3.0f);
  kernels().scale_scores(scores.data(), 21, 1.0f, 0.5f, 0.0f);
  EXPECT_EQ(scores, std::vector<float>(21, 2.0f));
}

TEST_P(Levels, AGrowingMaximumRescalesWhatWasSummed) {
  SoftmaxState state;
  std::vector<float> sums(19, 0.0f);
  std::vector<float> first = {1.0f, 2.0f};
  kernels().absorb_scores(first.data(), 2, state, sums.data(), 19);
  for (float& x : sums) x = 8.0f;
  std::vector<float> second = {5.0f};
  kernels().absorb_scores(second.data(), 1, state, sums.data(), 19);
  EXPECT_EQ(state.max, 5.0f);
  EXPECT_NEAR(state.sum, 1 + std::exp(-3.0) + std::exp(-4.0), 1e-6);
  for (float x : sums) EXPECT_NEAR(x, 8 * std::exp(-3.0), 1e-6);
}

TEST(SoftmaxStates, MergeToTheStateOfAllScores) {
  const SoftmaxState a{2.0f, 1.5f}, b{5.0f, 2.0f}, none{};
  const SoftmaxState both = merge(a, b);
  EXPECT_EQ(both.max, 5.0f);
  EXPECT_NEAR(both.sum, 2.0 + 1.5 * std::exp(-3.0), 1e-6);
  EXPECT_EQ(merge(b, a).sum, both.sum);
  EXPECT_EQ(merge(a, none).sum, a.sum);
  EXPECT_EQ(merge(none, none).log_sum_exp(), -kInfinity);
  EXPECT_NEAR(a.sum * output_weight(a, both) + b.sum * output_weight(b, both), 1.0, 1e-6);
  EXPECT_EQ(output_weight(none, both), 0.0f);
}

}  // namespace
}  // namespace kvx::tests::tile_kernels_test
