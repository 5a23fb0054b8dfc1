// Plain loops over rows; a task of the executor is a few rows, whatever the number of threads.
#include "runner/elementwise.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/checked.hpp"

namespace kvx::runner {
namespace {

constexpr int kRowsPerTask = 16;

template <class Row>
void for_each_row(int num_rows, Executor& executor, const Row& row) {
  executor.parallel_for(ceil_div(num_rows, kRowsPerTask), [&](int task) {
    const int end = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (int i = task * kRowsPerTask; i < end; ++i) row(int64_t{i});
  });
}

}  // namespace

void rms_norm(const float* x, int num_rows, std::span<const float> weights, float epsilon,
              float* out, Executor& executor) {
  const auto size = static_cast<int64_t>(weights.size());
  for_each_row(num_rows, executor, [&](int64_t row) {
    const float* from = x + row * size;
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += double{from[i]} * from[i];
    const double mean = squares / static_cast<double>(size);
    const auto factor = static_cast<float>(1.0 / std::sqrt(mean + epsilon));
    for (int64_t i = 0; i < size; ++i) out[row * size + i] = from[i] * factor * weights[i];
  });
}

void silu_multiply(float* gate, const float* up, int num_rows, int size, Executor& executor) {
  for_each_row(num_rows, executor, [&](int64_t row) {
    for (int64_t i = row * size; i < (row + 1) * size; ++i) {
      gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
  });
}

void add(float* x, const float* delta, int num_rows, int size, Executor& executor) {
  for_each_row(num_rows, executor, [&](int64_t row) {
    for (int64_t i = row * size; i < (row + 1) * size; ++i) x[i] += delta[i];
  });
}

void rope_angles(int64_t first_position, int num_rows, std::span<const double> frequencies,
                 float* cosines, float* sines) {
  for (int row = 0; row < num_rows; ++row) {
    const auto position = static_cast<double>(first_position + row);
    for (const double frequency : frequencies) {
      *cosines++ = static_cast<float>(std::cos(position * frequency));
      *sines++ = static_cast<float>(std::sin(position * frequency));
    }
  }
}

void rope(float* rows, int num_rows, int num_heads, int head_dim, int num_pairs,
          const float* cosines, const float* sines, Executor& executor) {
  for_each_row(num_rows, executor, [&](int64_t row) {
    const float* cosine = cosines + row * num_pairs;
    const float* sine = sines + row * num_pairs;
    for (int head = 0; head < num_heads; ++head) {
      float* pair = rows + (row * num_heads + head) * head_dim;
      for (int i = 0; i < num_pairs; ++i, pair += 2) {
        const float a = pair[0];
        const float b = pair[1];
        pair[0] = a * cosine[i] - b * sine[i];
        pair[1] = a * sine[i] + b * cosine[i];
      }
    }
  });
}

}  // namespace kvx::runner
