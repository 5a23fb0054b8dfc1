// Sampler chooses the next token from logits: the best one, or a seeded draw.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "core/result.hpp"

namespace kvx::runner {

struct SamplingOptions {
  float temperature = 0.0f;  // 0: always the likeliest token
  int top_k = 0;             // 0: all
  float top_p = 1.0f;        // the likeliest tokens that together have this probability
  uint64_t seed = 0;
};

class Sampler {
 public:
  // INVALID_ARGUMENT names the option and its value.
  static Result<Sampler> create(const SamplingOptions& options);

  // Requires: logits is not empty. NaN is never chosen unless all are. Ties: the lowest token.
  int sample(std::span<const float> logits);

 private:
  explicit Sampler(const SamplingOptions& options) : options_(options), random_(options.seed) {}
  void keep_likeliest(std::span<const float> logits);
  int draw();

  SamplingOptions options_;
  std::mt19937_64 random_;
  std::vector<std::pair<float, int>> kept_;  // logit and token, likeliest first
  std::vector<double> weights_;
};

int likeliest(std::span<const float> logits);

}  // namespace kvx::runner
