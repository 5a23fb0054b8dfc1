// Tensors are found by name, checked, and read row by row while matrices are packed.
#include "runner/weight_loader.hpp"

#include <algorithm>
#include <array>

#include "runner/dequantize.hpp"

namespace kvx::runner {

Result<const GgufTensor*> WeightLoader::find(const std::string& name,
                                             std::span<const int64_t> dims) const {
  const GgufTensor* tensor = gguf_.find_tensor(name);
  if (tensor == nullptr) return invalid_argument("tensor {} is missing", name);
  if (!std::ranges::equal(tensor->dims, dims)) {
    return invalid_argument("tensor {} is [{}]; [{}] was expected", name,
                            fmt::join(tensor->dims, ", "), fmt::join(dims, ", "));
  }
  return tensor;
}

Result<std::vector<float>> WeightLoader::load_vector(const std::string& name, int size) const {
  KVX_ASSIGN_OR_RETURN(const GgufTensor* tensor, find(name, std::array{int64_t{size}}));
  std::vector<float> values(static_cast<size_t>(size));
  dequantize(tensor->type, tensor->data.data(), size, values.data());
  return values;
}

LinearPart rows_of(const GgufTensor& tensor, int64_t first_row, int num_rows) {
  LinearPart part;
  part.num_rows = num_rows;
  part.read_rows = [&tensor, first_row](int first, int rows, float* out) {
    dequantize(tensor.type, tensor.row(first_row + first), rows * tensor.row_elements(), out);
  };
  return part;
}

Result<std::unique_ptr<Linear>> WeightLoader::load_linear(
    int num_columns, std::span<const std::pair<std::string, int>> matrices) const {
  std::vector<LinearPart> parts;
  for (const auto& [name, num_rows] : matrices) {
    KVX_ASSIGN_OR_RETURN(const GgufTensor* tensor,
                         find(name, std::array{int64_t{num_columns}, int64_t{num_rows}}));
    LinearPart part = rows_of(*tensor, 0, num_rows);
    const std::string bias = name.substr(0, name.rfind('.')) + ".bias";
    if (contains(bias)) {
      KVX_ASSIGN_OR_RETURN(part.bias, load_vector(bias, num_rows));
    }
    parts.push_back(std::move(part));
  }
  return create_linear(num_columns, std::move(parts));
}

Result<std::unique_ptr<Linear>> WeightLoader::create_linear(int num_columns,
                                                            std::vector<LinearPart> parts) const {
  if (gpu_ != nullptr) return gpu_->create_linear(num_columns, std::move(parts), weights_);
  return create_cpu_linear(num_columns, std::move(parts), weights_, memory_);
}

}  // namespace kvx::runner
