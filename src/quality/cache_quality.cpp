// CacheQuality turns per-token measures into means with standard errors.
#include "quality/cache_quality.hpp"

#include <cmath>

namespace kvx::quality {
namespace {

template <class Measure>
void add_measure(std::span<const ScoredToken> tokens, Measure measure, ClusteredMean& mean) {
  std::vector<double> numbers;
  numbers.reserve(tokens.size());
  for (const ScoredToken& token : tokens) numbers.push_back(measure(token));
  add_in_clusters(numbers, CacheQuality::kClusterTokens, mean);
}

Estimate scaled(const ClusteredMean& mean, double factor) {
  return {factor * mean.mean(), factor * mean.standard_error()};
}

}  // namespace

void CacheQuality::add_window(std::span<const ScoredToken> tokens) {
  add_measure(
      tokens, [](const ScoredToken& t) { return t.nll; }, nll_);
  add_measure(
      tokens, [](const ScoredToken& t) { return t.nll - t.base_nll; }, difference_);
  add_measure(
      tokens, [](const ScoredToken& t) { return t.kl; }, kl_);
  add_measure(
      tokens, [](const ScoredToken& t) { return t.same_top ? 1.0 : 0.0; }, same_top_);
}

Estimate CacheQuality::perplexity() const {
  const double perplexity = std::exp(nll_.mean());
  return {perplexity, perplexity * nll_.standard_error()};
}

Estimate CacheQuality::change_percent() const {
  const double ratio = std::exp(difference_.mean());
  return {100 * (ratio - 1), 100 * ratio * difference_.standard_error()};
}

Estimate CacheQuality::kl() const {
  return scaled(kl_, 1);
}

Estimate CacheQuality::same_top_percent() const {
  return scaled(same_top_, 100);
}

}  // namespace kvx::quality
