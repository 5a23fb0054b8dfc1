// Logit measures against softmaxes worked out by hand.
#include "quality/logits.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace kvx::quality {
namespace {

float log_of(double x) {
  return static_cast<float>(std::log(x));
}

TEST(Logits, GiveTheLikelihoodOfTheTokenThatCame) {
  // Weights 1, 2, 5 of 8.
  const std::vector<float> logits = {0, log_of(2), log_of(5)};
  const LogitSummary summary = summarize(logits);
  EXPECT_NEAR(summary.log_sum_exp, std::log(8.0), 1e-7);
  EXPECT_EQ(summary.top, 2);
  EXPECT_NEAR(negative_log_likelihood(logits, summary, 0), std::log(8.0), 1e-7);
  EXPECT_NEAR(negative_log_likelihood(logits, summary, 2), std::log(8.0 / 5.0), 1e-7);
}

TEST(Logits, DoNotOverflowWhenTheyAreLarge) {
  const std::vector<float> logits = {1000, 1000};
  EXPECT_NEAR(negative_log_likelihood(logits, summarize(logits), 1), std::log(2.0), 1e-12);
}

TEST(Logits, TakeTheFirstOfEqualTops) {
  EXPECT_EQ(summarize(std::vector<float>{1, 3, 3}).top, 1);
}

TEST(Logits, DivergeFromABaseByTheTextbookSum) {
  // p = (1/2, 1/2), q = (1/4, 3/4): KL = log(2) / 2 + log(2/3) / 2.
  const std::vector<float> base = {0, 0};
  const std::vector<float> other = {0, log_of(3)};
  const double expected = 0.5 * std::log(2.0) + 0.5 * std::log(2.0 / 3.0);
  EXPECT_NEAR(kl_divergence(base, summarize(base), other, summarize(other)), expected, 1e-7);
}

TEST(Logits, DoNotDivergeFromThemselvesOrFromAShiftedCopy) {
  const std::vector<float> base = {0.5f, -1, 2};
  const std::vector<float> shifted = {8.5f, 7, 10};
  EXPECT_EQ(kl_divergence(base, summarize(base), base, summarize(base)), 0);
  EXPECT_NEAR(kl_divergence(base, summarize(base), shifted, summarize(shifted)), 0, 1e-12);
}

TEST(Logits, IgnoreATokenThatTheBaseRulesOut) {
  const float never = -std::numeric_limits<float>::infinity();
  const std::vector<float> base = {0, never};
  const std::vector<float> other = {0, 0};
  EXPECT_NEAR(kl_divergence(base, summarize(base), other, summarize(other)), std::log(2.0), 1e-12);
}

TEST(Logits, ShowANan) {
  const std::vector<float> base = {0, 0};
  const std::vector<float> broken = {0, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_TRUE(std::isnan(summarize(broken).log_sum_exp));
  EXPECT_TRUE(std::isnan(kl_divergence(base, summarize(base), broken, summarize(broken))));
}

}  // namespace
}  // namespace kvx::quality
