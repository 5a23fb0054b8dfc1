// The choice of the next token.
#include "runner/sampler.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

namespace kvx::runner {
namespace {

Sampler sampler(SamplingOptions options) {
  return Sampler::create(options).value();
}

TEST(Sampler, TakesTheLikeliestTokenAtTemperatureZero) {
  EXPECT_EQ(sampler({}).sample(std::array{1.0f, 3.0f, 2.0f}), 1);
  EXPECT_EQ(sampler({}).sample(std::array{3.0f, 3.0f}), 0);
  EXPECT_EQ(sampler({}).sample(std::array{std::nanf(""), -5.0f}), 1);
}

TEST(Sampler, DrawsInProportionToTheProbabilities) {
  Sampler drawing = sampler({.temperature = 1.0f, .seed = 5});
  const std::array logits{std::log(1.0f), std::log(2.0f), std::log(5.0f)};
  std::array<int, 3> counts{};
  for (int i = 0; i < 8000; ++i) ++counts[drawing.sample(logits)];
  EXPECT_NEAR(counts[0], 1000, 150);
  EXPECT_NEAR(counts[1], 2000, 200);
  EXPECT_NEAR(counts[2], 5000, 250);
}

TEST(Sampler, NeverDrawsWhatTopKOrTopPLeaveOut) {
  const std::array logits{std::log(1.0f), std::log(2.0f), std::log(5.0f)};
  Sampler best_two = sampler({.temperature = 1.0f, .top_k = 2, .seed = 1});
  Sampler most_mass = sampler({.temperature = 1.0f, .top_p = 0.6f, .seed = 1});
  for (int i = 0; i < 500; ++i) {
    EXPECT_NE(best_two.sample(logits), 0);
    EXPECT_EQ(most_mass.sample(logits), 2);
  }
}

TEST(Sampler, RepeatsItselfWithTheSameSeed) {
  const std::array logits{0.1f, 0.2f, 0.3f, 0.4f};
  Sampler one = sampler({.temperature = 2.0f, .seed = 7});
  Sampler two = sampler({.temperature = 2.0f, .seed = 7});
  for (int i = 0; i < 100; ++i) EXPECT_EQ(one.sample(logits), two.sample(logits));
}

TEST(Sampler, RefusesOptionsThatMakeNoSense) {
  EXPECT_FALSE(Sampler::create({.temperature = -1.0f}).ok());
  EXPECT_FALSE(Sampler::create({.temperature = std::nanf("")}).ok());
  EXPECT_FALSE(Sampler::create({.top_k = -1}).ok());
  EXPECT_FALSE(Sampler::create({.top_p = 0.0f}).ok());
  EXPECT_FALSE(Sampler::create({.top_p = 1.5f}).ok());
}

}  // namespace
}  // namespace kvx::runner
