// CacheQuality: what one cache does to a model's predictions, beside the same model on a base
// cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "quality/clustered_mean.hpp"

namespace kvx::quality {

// One scored token, under the base cache and under the cache that is judged.
struct ScoredToken {
  double base_nll;  // negative log-likelihood of the text's next token, in nats
  double nll;
  double kl;  // divergence of the judged row from the base row, in nats
  bool same_top;
};

// A number with its standard error (NaN where there are too few clusters to tell).
struct Estimate {
  double value;
  double standard_error;
};

class CacheQuality {
 public:
  // Consecutive tokens that share an error; see ClusteredMean.
  static constexpr int kClusterTokens = 64;

  // The scored tokens of one window, in order.
  void add_window(std::span<const ScoredToken> tokens);

  int64_t num_tokens() const { return nll_.count(); }

  // exp(mean nll); its error is the delta method's: perplexity * error of the mean.
  Estimate perplexity() const;

  // 100 * (exp(mean of nll - base_nll) - 1): the change of perplexity in percent. It is paired:
  // the differences are taken token by token, so what the text itself varies cancels. Error by the
  // delta method: 100 * exp(mean) * error of the mean.
  Estimate change_percent() const;

  Estimate kl() const;

  // Percent of tokens where both caches put the same token first.
  Estimate same_top_percent() const;

 private:
  ClusteredMean nll_;
  ClusteredMean difference_;
  ClusteredMean kl_;
  ClusteredMean same_top_;
};

}  // namespace kvx::quality
