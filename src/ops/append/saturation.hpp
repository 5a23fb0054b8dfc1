// Saturated numbers, counted while rows are encoded (format/saturation.hpp).
#pragma once

#include "format/saturation.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// How many of x, [n], are saturated under a step.
inline int count_saturated(const format::SaturationLimit& limit, float step, const float* x,
                           int n) {
  const float inverse = format::reciprocal(step);
  int count = 0;
  for (int i = 0; i < n; ++i) count += limit.is_exceeded_by(x[i], inverse);
  return count;
}

// How many of x, [n], are finite and beyond +-limit.
inline int count_beyond(float limit, const float* x, int n) {
  int count = 0;
  for (int i = 0; i < n; ++i) {
    count += format::is_finite(x[i]) && (x[i] > limit || x[i] < -limit);
  }
  return count;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
