// WeightLoader: a model's tensors as vectors and packed matrices, each of the expected shape.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runner/gguf.hpp"
#include "runner/gpu_products.hpp"
#include "runner/linear.hpp"

namespace kvx::runner {

// Errors name the tensor that is missing or has another shape. What it refers to outlives it, and
// the file's bytes outlive the call alone: weights are copied.
class WeightLoader {
 public:
  // weights: kF32 or kBF16, packed into memory; gpu: what multiplies instead of the CPU, or null.
  WeightLoader(const GgufView& gguf, DType weights, WeightMemory& memory, GpuProducts* gpu)
      : gguf_(gguf), weights_(weights), memory_(memory), gpu_(gpu) {}

  bool contains(const std::string& name) const { return gguf_.find_tensor(name) != nullptr; }
  // dims: dims[0] is contiguous.
  Result<const GgufTensor*> find(const std::string& name, std::span<const int64_t> dims) const;
  Result<std::vector<float>> load_vector(const std::string& name, int size) const;

  // Matrices [num_rows, num_columns] by name. A bias is the tensor of the same name that ends in
  // .bias, if there is one.
  Result<std::unique_ptr<Linear>> load_linear(
      int num_columns, std::span<const std::pair<std::string, int>> matrices) const;
  Result<std::unique_ptr<Linear>> create_linear(int num_columns,
                                                std::vector<LinearPart> parts) const;

 private:
  const GgufView& gguf_;
  DType weights_;
  WeightMemory& memory_;
  GpuProducts* gpu_;
};

// Rows [first_row, first_row + num_rows) of a tensor, which outlives the part's use.
LinearPart rows_of(const GgufTensor& tensor, int64_t first_row, int num_rows);

}  // namespace kvx::runner
