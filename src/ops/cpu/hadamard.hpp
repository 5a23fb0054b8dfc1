// The fast Walsh-Hadamard transform of rows, in place (docs/numbers.md, section 6).
#pragma once

#include "ops/cpu/level.hpp"
#include "ops/transform.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// 1 / sqrt(n) rounded to binary32. Requires: n is a power of two.
inline float hadamard_norm(int n) {
  float norm = 1.0f;
  for (; n >= 4; n /= 4) norm *= 0.5f;
  return n == 2 ? norm * 0x1.6A09E6p-1f : norm;
}

// rows: [num_rows, head_dim].
inline void hadamard_rows(float* rows, int num_rows, int head_dim) {
  const int n = hadamard_block(head_dim);
  const float norm = hadamard_norm(n);
  const int64_t num_floats = int64_t{num_rows} * head_dim;
  for (int stride = 1; stride < n; stride *= 2) {
    for (int64_t first = 0; first < num_floats; first += 2 * stride) {
      float* low = rows + first;
      float* high = low + stride;
      for (int i = 0; i < stride; ++i) {
        const float a = low[i];
        const float b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
  for (int64_t i = 0; i < num_floats; ++i) rows[i] *= norm;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
