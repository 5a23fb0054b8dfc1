// Sampling by hand, not by <random>'s distributions: those differ between standard libraries.
#include "runner/sampler.hpp"

#include <algorithm>
#include <cmath>

namespace kvx::runner {

Result<Sampler> Sampler::create(const SamplingOptions& options) {
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    return invalid_argument("temperature is {}; 0 or more was expected", options.temperature);
  }
  if (options.top_k < 0) {
    return invalid_argument("top_k is {}; 0 (all) or more was expected", options.top_k);
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    return invalid_argument("top_p is {}; more than 0, at most 1 was expected", options.top_p);
  }
  return Sampler(options);
}

int likeliest(std::span<const float> logits) {
  int best = 0;
  for (size_t i = 1; i < logits.size(); ++i) {
    if (logits[i] > logits[best] || std::isnan(logits[best])) best = static_cast<int>(i);
  }
  return best;
}

int Sampler::sample(std::span<const float> logits) {
  if (options_.temperature == 0) return likeliest(logits);
  keep_likeliest(logits);
  return kept_.empty() ? 0 : draw();
}

void Sampler::keep_likeliest(std::span<const float> logits) {
  kept_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isnan(logits[i])) kept_.emplace_back(logits[i], static_cast<int>(i));
  }
  std::sort(kept_.begin(), kept_.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  const auto most = static_cast<size_t>(options_.top_k);
  if (most > 0 && kept_.size() > most) kept_.resize(most);
}

int Sampler::draw() {
  weights_.clear();
  double total = 0;
  for (const auto& [logit, token] : kept_) {
    weights_.push_back(std::exp((double{logit} - kept_[0].first) / options_.temperature));
    total += weights_.back();
  }
  double nucleus = 0;
  size_t count = 0;
  while (count < weights_.size() && nucleus < options_.top_p * total) nucleus += weights_[count++];

  const double uniform = static_cast<double>(random_() >> 11) * 0x1p-53;  // [0, 1)
  double left = uniform * nucleus;
  for (size_t i = 0; i + 1 < count; ++i) {
    left -= weights_[i];
    if (left < 0) return kept_[i].second;
  }
  return kept_[count - 1].second;
}

}  // namespace kvx::runner
