// The fast Walsh-Hadamard transform of rows, in place (docs/numbers.md, section 6).
#pragma once

#include "ops/cpu/lanes.hpp"
#include "ops/transform.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// 1 / sqrt(n) rounded to binary32. Requires: n is a power of two.
inline float hadamard_norm(int n) {
  float norm = 1.0f;
  for (; n >= 4; n /= 4) norm *= 0.5f;
  return n == 2 ? norm * 0x1.6A09E6p-1f : norm;
}

// (a, b) -> (a + b, a - b) for all pairs `stride` apart.
inline void hadamard_step(float* x, int n, int stride) {
  for (int i = 0; i < n; i += 2 * stride) {
    for_lanes(stride, [a = x + i, b = x + i + stride]<class V>(int j) {
      const V low = load<V>(a + j);
      const V high = load<V>(b + j);
      store<V>(low + high, a + j);
      store<V>(low - high, b + j);
    });
  }
}

// hadamard_step for lanes whose index differs in the bit `Stride`: the partner's lane plus or minus
// the own one.
template <int Stride, int... Lane>
KVX_INLINE Widest hadamard_lanes(const Widest& x, std::integer_sequence<int, Lane...>) {
  const Widest partners = __builtin_shufflevector(x, x, (Lane ^ Stride)...);
  const Widest signs = {((Lane & Stride) != 0 ? -1.0f : 1.0f)...};
  return add_exact_product(x, signs, partners);
}

template <int Stride = 1>
KVX_INLINE void hadamard_in_vectors(Widest* x, int num_vectors) {
  if constexpr (Stride < kLanes<Widest>) {
    for (int i = 0; i < num_vectors; ++i) {
      x[i] = hadamard_lanes<Stride>(x[i], std::make_integer_sequence<int, kLanes<Widest>>());
    }
    hadamard_in_vectors<Stride * 2>(x, num_vectors);
  }
}

// As many numbers as stay in registers from the first step to the last one.
template <int Vectors>
KVX_INLINE void hadamard_in_registers(float* numbers, float norm) {
  constexpr int kN = kLanes<Widest>;
  Widest x[Vectors];
  for (int i = 0; i < Vectors; ++i) x[i] = load<Widest>(numbers + i * kN);
  hadamard_in_vectors(x, Vectors);
  for (int stride = 1; stride < Vectors; stride *= 2) {
    for (int i = 0; i < Vectors; ++i) {
      if ((i & stride) != 0) continue;
      const Widest low = x[i];
      x[i] = low + x[i + stride];
      x[i + stride] = low - x[i + stride];
    }
  }
  for (int i = 0; i < Vectors; ++i) store<Widest>(x[i] * norm, numbers + i * kN);
}

inline constexpr int kHadamardVectors = 8;

// Blocks of Vectors vectors or of what is smaller, whatever there is. Requires: n is a power of
// two.
template <int Vectors = kHadamardVectors>
KVX_INLINE void hadamard_parts(float* x, int n, int num_floats, float norm) {
  constexpr int kNumbers = Vectors * kLanes<Widest>;
  if (n >= kNumbers) {
    for (int i = 0; i < num_floats; i += kNumbers) hadamard_in_registers<Vectors>(x + i, norm);
  } else if constexpr (Vectors > 1) {
    hadamard_parts<Vectors / 2>(x, n, num_floats, norm);
  } else {
    for (int stride = 1; stride < n; stride *= 2) hadamard_step(x, num_floats, stride);
    for (int i = 0; i < num_floats; ++i) x[i] *= norm;
  }
}

// rows: [num_rows, head_dim].
inline void hadamard_rows(float* rows, int num_rows, int head_dim) {
  constexpr int kMostNumbers = kHadamardVectors * kLanes<Widest>;
  const int n = hadamard_block(head_dim);
  const float norm = hadamard_norm(n);
  for (int row = 0; row < num_rows; ++row) {
    float* x = rows + int64_t{row} * head_dim;
    if (n <= kMostNumbers) {
      hadamard_parts(x, n, head_dim, norm);
      continue;
    }
    hadamard_parts(x, n, head_dim, 1.0f);
    for (int stride = kMostNumbers; stride < n; stride *= 2) hadamard_step(x, head_dim, stride);
    for (int i = 0; i < head_dim; ++i) x[i] *= norm;
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
