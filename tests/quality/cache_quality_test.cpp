// CacheQuality against a handful of tokens worked out by hand.
#include "quality/cache_quality.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace kvx::quality {
namespace {

// `count` tokens that all look the same.
std::vector<ScoredToken> tokens_of(int count, const ScoredToken& token) {
  return std::vector<ScoredToken>(static_cast<size_t>(count), token);
}

TEST(CacheQuality, TurnsLikelihoodsIntoPerplexityAndChange) {
  CacheQuality quality;
  const std::vector<ScoredToken> window = {
      {.base_nll = std::log(2.0), .nll = std::log(4.0), .kl = 0.25, .same_top = true},
      {.base_nll = std::log(8.0), .nll = std::log(16.0), .kl = 0.75, .same_top = false}};
  quality.add_window(window);
  EXPECT_EQ(quality.num_tokens(), 2);
  EXPECT_NEAR(quality.perplexity().value, 8, 1e-12);        // sqrt(4 * 16)
  EXPECT_NEAR(quality.change_percent().value, 100, 1e-12);  // twice the base's 4
  EXPECT_DOUBLE_EQ(quality.kl().value, 0.5);
  EXPECT_DOUBLE_EQ(quality.same_top_percent().value, 50);
}

TEST(CacheQuality, CancelsWhatTheTextItselfVaries) {
  // The text's difficulty differs by a factor of e^4 between windows; the cache costs the same.
  CacheQuality quality;
  quality.add_window(tokens_of(64, {.base_nll = 1, .nll = 1.01, .kl = 0.1, .same_top = true}));
  quality.add_window(tokens_of(64, {.base_nll = 5, .nll = 5.01, .kl = 0.1, .same_top = true}));
  EXPECT_GT(quality.perplexity().standard_error, 10);
  EXPECT_NEAR(quality.change_percent().value, 100 * std::expm1(0.01), 1e-9);
  EXPECT_NEAR(quality.change_percent().standard_error, 0, 1e-6);
}

TEST(CacheQuality, TakesItsErrorFromRunsOf64Tokens) {
  // Two runs with differences 0 and 0.02: mean 0.01, error of the mean 0.01.
  CacheQuality quality;
  std::vector<ScoredToken> window =
      tokens_of(64, {.base_nll = 1, .nll = 1, .kl = 0, .same_top = true});
  const std::vector<ScoredToken> second =
      tokens_of(64, {.base_nll = 1, .nll = 1.02, .kl = 0.2, .same_top = true});
  window.insert(window.end(), second.begin(), second.end());
  quality.add_window(window);
  EXPECT_NEAR(quality.change_percent().standard_error, 100 * std::exp(0.01) * 0.01, 1e-9);
  EXPECT_NEAR(quality.kl().standard_error, 0.1, 1e-9);
}

TEST(CacheQuality, NeverJoinsTokensOfTwoWindowsInOneRun) {
  // 32 + 32 tokens are two clusters, not one: with one the error would be unknown.
  CacheQuality quality;
  quality.add_window(tokens_of(32, {.base_nll = 1, .nll = 1, .kl = 0, .same_top = true}));
  EXPECT_TRUE(std::isnan(quality.kl().standard_error));
  quality.add_window(tokens_of(32, {.base_nll = 1, .nll = 1, .kl = 1, .same_top = true}));
  EXPECT_NEAR(quality.kl().standard_error, 0.5, 1e-9);
}

}  // namespace
}  // namespace kvx::quality
