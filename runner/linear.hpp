// Matrix products: weights packed once for oneDNN, f32 or bf16, multiplied on a kvx::Executor; or
// kept on a GPU (gpu_products.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/dtype.hpp"
#include "core/executor.hpp"
#include "core/result.hpp"
#include "runner/weight_memory.hpp"

namespace kvx::runner {

// True where the CPU multiplies bf16 itself; elsewhere bf16 weights are refused, not emulated.
bool cpu_multiplies_bf16();

// One weight matrix [num_rows, num_columns] and its optional bias [num_rows].
struct LinearPart {
  int num_rows = 0;
  // Writes rows [first_row, first_row + num_rows) as f32, row after row.
  std::function<void(int first_row, int num_rows, float* out)> read_rows;
  std::vector<float> bias;
};

class GpuLinear;

// Several matrices that multiply the same input (q, k and v; gate and up).
class Linear {
 public:
  virtual ~Linear() = default;
  // This one if its weights lie on a GPU, otherwise null.
  virtual GpuLinear* on_gpu() { return nullptr; }

  // out[p] = x * parts[p]^T + bias. x: [num_tokens, num_columns]; outs[p]: [num_tokens, num_rows of
  // part p]. Not to be called from several threads at once.
  virtual Status multiply(const float* x, int num_tokens, std::span<float* const> outs,
                          Executor& executor) = 0;
};

// On the CPU, in one pass over the threads. The work is cut by shape alone, so results do not
// depend on the number of threads. weights: kF32 or kBF16, packed into memory, which outlives the
// Linear. INTERNAL: oneDNN refuses a shape.
Result<std::unique_ptr<Linear>> create_cpu_linear(int num_columns, std::vector<LinearPart> parts,
                                                  DType weights, WeightMemory& memory);

}  // namespace kvx::runner
