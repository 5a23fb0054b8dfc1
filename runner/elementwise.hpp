// The element-wise parts of a Llama layer, on rows, on an executor.
#pragma once

#include <span>

#include "core/executor.hpp"

namespace kvx::runner {

// out = x / sqrt(mean(x^2) + epsilon) * weights. x, out: [num_rows, weights.size()].
void rms_norm(const float* x, int num_rows, std::span<const float> weights, float epsilon,
              float* out, Executor& executor);

// gate = silu(gate) * up, silu(x) = x / (1 + exp(-x)). gate, up: [num_rows, size].
void silu_multiply(float* gate, const float* up, int num_rows, int size, Executor& executor);

// x += delta. x, delta: [num_rows, size].
void add(float* x, const float* delta, int num_rows, int size, Executor& executor);

// positions first_position and up. cosines, sines: [num_rows, frequencies.size()].
void rope_angles(int64_t first_position, int num_rows, std::span<const double> frequencies,
                 float* cosines, float* sines);

// Rotates pairs (2i, 2i + 1) of each head's first 2 * num_pairs numbers, as GGUF's llama order has
// them. rows: [num_rows, num_heads, head_dim]; cosines, sines: [num_rows, num_pairs].
void rope(float* rows, int num_rows, int num_heads, int head_dim, int num_pairs,
          const float* cosines, const float* sines, Executor& executor);

}  // namespace kvx::runner
