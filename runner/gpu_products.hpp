// GpuProducts: matrix products on a GPU by cuBLAS, for a model whose other steps are the host's.
#pragma once

#include <memory>
#include <vector>

#include "cache/pool/memory.hpp"
#include "runner/linear.hpp"

namespace kvx::runner {

// The functions of cuBLAS that are called, found when the program runs: kvx is built without it.
struct Cublas;

// One model's, and one thread's at a time. Outlives its Linears.
class GpuProducts {
 public:
  // On the first device. UNSUPPORTED as device::open_cuda_device, and where no libcublas is found.
  static Result<std::unique_ptr<GpuProducts>> create();
  ~GpuProducts();

  // weights: kF32, multiplied in f32 (not TF32), or kBF16 with sums in f32. OUT_OF_RANGE: the
  // device has no room for them.
  Result<std::unique_ptr<Linear>> create_linear(int num_columns, std::vector<LinearPart> parts,
                                                DType weights);

 private:
  friend class GpuLinear;
  // A matrix product's input or output: on the device, and pinned on the host.
  struct Staged {
    cache::Region device;
    cache::Region host;
  };

  GpuProducts(device::CudaDevice device, device::OwnedCudaStream stream,
              std::unique_ptr<Cublas> cublas);
  // Makes room for bytes. Requires: nothing is on its way.
  Status reserve(Staged& staged, int64_t bytes);

  device::CudaDevice device_;
  device::OwnedCudaStream stream_;
  std::unique_ptr<Cublas> cublas_;
  std::unique_ptr<cache::Memory> memory_;
  std::unique_ptr<cache::Memory> pinned_;
  Staged input_;   // [tokens, columns] in the weights' type
  Staged output_;  // [tokens, rows of all parts], f32
};

}  // namespace kvx::runner
