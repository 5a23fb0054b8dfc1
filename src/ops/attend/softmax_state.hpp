// SoftmaxState: the running maximum and sum of a softmax over scores that arrive in parts, and the
// rule by which two parts become one.
#pragma once

#include <cmath>
#include <limits>

namespace kvx::ops {

// sum = sum of exp(score - max). No scores: max is -infinity and sum 0.
struct SoftmaxState {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;

  float log_sum_exp() const {
    return sum == 0 ? -std::numeric_limits<float>::infinity() : max + std::log(sum);
  }
};

// What to multiply a part's sums with when its maximum is replaced by the whole's, which is no
// smaller.
inline float rescale(const SoftmaxState& part, float whole_max) {
  return part.sum == 0 ? 0.0f : std::exp(part.max - whole_max);
}

inline SoftmaxState merge(const SoftmaxState& a, const SoftmaxState& b) {
  const float max = a.max > b.max ? a.max : b.max;
  return {max, a.sum * rescale(a, max) + b.sum * rescale(b, max)};
}

// The factor that turns a part's weighted sum of values into its share of the whole's output: the
// outputs of all parts, each times its own, add up to sum_t softmax(score)_t * v_t.
inline float output_weight(const SoftmaxState& part, const SoftmaxState& whole) {
  return part.sum == 0 ? 0.0f : rescale(part, whole.max) / whole.sum;
}

}  // namespace kvx::ops
