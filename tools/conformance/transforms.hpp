// Transform: a layer's transform with its memory, and its arithmetic from docs/numbers.md.
#pragma once

#include <cmath>

#include "tools/conformance/memory.hpp"
#include "tools/conformance/provider.hpp"

namespace kvx::conformance {

class Transform {
 public:
  // Mean, factor, Hadamard rotation and, with num_offset_blocks, a block_offset.
  Transform(Memory& memory, const std::string& name, int64_t num_heads, int dim,
            int64_t num_offset_blocks)
      : num_heads_(num_heads), dim_(dim) {
    for (int64_t i = 0; i < num_heads * dim; ++i) {
      mean_.push_back(static_cast<float>(i % 11 - 5) / 8.0f);
      factor_.push_back(static_cast<float>(1 + i % 5) / 4.0f);
    }
    for (int64_t i = 0; i < num_offset_blocks * num_heads * dim; ++i) {
      offset_.push_back(static_cast<float>(i % 13 - 6) / 16.0f);
    }
    transform.size = sizeof transform;
    transform.flags = KVX_TRANSFORM_HADAMARD;
    transform.mean = memory.add_list(name + " mean", mean_);
    transform.factor = memory.add_list(name + " factor", factor_);
    if (num_offset_blocks == 0) return;
    transform.block_offset = memory.add_list(name + " block offset", offset_);
    transform.num_offset_blocks = num_offset_blocks;
  }

  std::vector<float> apply(std::vector<float> row, int64_t head, int64_t block) const {
    for (int d = 0; d < dim_; ++d) {
      float& x = row[static_cast<size_t>(d)];
      x = x - mean_[at(head, d)];
      if (!offset_.empty()) x = x - offset_[at(block * num_heads_ + head, d)];
      x = x * factor_[at(head, d)];
    }
    rotate(row);
    return row;
  }

  std::vector<float> undo(std::vector<float> row, int64_t head, int64_t block) const {
    rotate(row);
    for (int d = 0; d < dim_; ++d) {
      float& x = row[static_cast<size_t>(d)];
      x = x / factor_[at(head, d)];
      if (!offset_.empty()) x = x + offset_[at(block * num_heads_ + head, d)];
      x = x + mean_[at(head, d)];
    }
    return row;
  }

  kvx_transform_t transform{};

 private:
  size_t at(int64_t row, int d) const { return static_cast<size_t>(row * dim_ + d); }

  // Butterflies over blocks of the largest power of two that divides the row.
  void rotate(std::vector<float>& row) const {
    const int n = dim_ & -dim_;
    for (int stride = 1; stride < n; stride *= 2) {
      for (int i = 0; i < dim_; ++i) {
        if (i / stride % 2 != 0) continue;
        float& a = row[static_cast<size_t>(i)];
        float& b = row[static_cast<size_t>(i + stride)];
        const float sum = a + b;
        b = a - b;
        a = sum;
      }
    }
    const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(n)));
    for (float& x : row) x *= scale;
  }

  int64_t num_heads_;
  int dim_;
  std::vector<float> mean_;
  std::vector<float> factor_;
  std::vector<float> offset_;
};

}  // namespace kvx::conformance
