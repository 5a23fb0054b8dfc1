// Softmax statistics of logit rows in double precision.
#include "quality/logits.hpp"

#include <cmath>
#include <cstddef>

namespace kvx::quality {

LogitSummary summarize(std::span<const float> logits) {
  size_t top = 0;
  for (size_t i = 1; i < logits.size(); ++i) {
    if (logits[i] > logits[top]) top = i;
  }
  const double largest = logits[top];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return {largest + std::log(sum), static_cast<int>(top)};
}

double negative_log_likelihood(std::span<const float> logits, const LogitSummary& summary,
                               int token) {
  return summary.log_sum_exp - logits[static_cast<size_t>(token)];
}

double kl_divergence(std::span<const float> base, const LogitSummary& base_summary,
                     std::span<const float> other, const LogitSummary& other_summary) {
  double divergence = 0;
  for (size_t i = 0; i < base.size(); ++i) {
    const double log_p = base[i] - base_summary.log_sum_exp;
    const double log_q = other[i] - other_summary.log_sum_exp;
    const double p = std::exp(log_p);
    // A token that base rules out (p = 0) adds nothing, whatever the other gives.
    if (p > 0) divergence += p * (log_p - log_q);
  }
  return divergence;
}

}  // namespace kvx::quality
