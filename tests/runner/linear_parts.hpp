// Made-up matrices for runner::Linear.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "runner/linear.hpp"

namespace kvx::runner {

inline std::vector<float> random_numbers(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
  return numbers;
}

// weights: [rows, columns], which outlive the part.
inline LinearPart part_of(const std::vector<float>& weights, int columns,
                          std::vector<float> bias = {}) {
  LinearPart part;
  part.num_rows = static_cast<int>(weights.size()) / columns;
  part.read_rows = [&weights, columns](int first, int rows, float* out) {
    std::copy_n(weights.begin() + first * columns, rows * columns, out);
  };
  part.bias = std::move(bias);
  return part;
}

}  // namespace kvx::runner
