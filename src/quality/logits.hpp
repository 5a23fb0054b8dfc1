// Measures on rows of logits: likelihood of the token that came, divergence from a base row, top
// token.
#pragma once

#include <span>

namespace kvx::quality {

// What the other measures need of a row, computed once. Natural logarithms, sums in double.
struct LogitSummary {
  double log_sum_exp;
  int top;  // the index of the largest logit; of equal ones the first
};

// logits: [vocabulary], not empty. A NaN anywhere makes log_sum_exp NaN.
LogitSummary summarize(std::span<const float> logits);

// -log softmax(logits)[token]. Requires: token is an index of logits.
double negative_log_likelihood(std::span<const float> logits, const LogitSummary& summary,
                               int token);

// Kullback-Leibler divergence of `other` from `base`, in nats: sum_i p_i * (log p_i - log q_i), p
// the softmax of base. Both rows have the same length.
double kl_divergence(std::span<const float> base, const LogitSummary& base_summary,
                     std::span<const float> other, const LogitSummary& other_summary);

}  // namespace kvx::quality
