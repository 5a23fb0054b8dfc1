// The fast Walsh-Hadamard transform of rows, in place (docs/numbers.md, section 6).
#pragma once

#include <utility>

#include "format/spec.hpp"
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

// One step of the butterfly over neighbours: sums to the first half, differences to the second. A
// step moves every number's lowest index bit to the top, so that step k pairs what the butterfly
// with stride 2^k pairs, and log2(n) steps end in the natural order. Neighbours keep the loop the
// same for every step, and in whole vectors.
inline void hadamard_step(const float* from, int n, float* to) {
  const int half = n / 2;
  for (int i = 0; i < half; ++i) {
    const float a = from[2 * i];
    const float b = from[2 * i + 1];
    to[i] = a + b;
    to[half + i] = a - b;
  }
}

inline void hadamard_of_block(float* x, int n, float norm) {
  float other[format::kMaxHeadDim];
  float* from = x;
  float* to = other;
  for (int stride = 1; stride < n; stride *= 2) {
    hadamard_step(from, n, to);
    std::swap(from, to);
  }
  for (int i = 0; i < n; ++i) x[i] = from[i] * norm;
}

// rows: [num_rows, head_dim].
inline void hadamard_rows(float* rows, int num_rows, int head_dim) {
  const int n = hadamard_block(head_dim);
  const float norm = hadamard_norm(n);
  const int64_t num_floats = int64_t{num_rows} * head_dim;
  for (int64_t first = 0; first < num_floats; first += n) hadamard_of_block(rows + first, n, norm);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
