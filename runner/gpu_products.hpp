// GpuProducts: matrix products on a GPU by cuBLAS, of rows on the host or on the device.
#pragma once

#include <memory>
#include <vector>

#include "cache/pool/memory.hpp"
#include "device/cuda_async.hpp"
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

  // Products of rows on the device go to this stream from now on, behind what record_work() was
  // called after: caches have a stream each, and share the workspace and a model's buffers.
  Status use_stream(device::CudaStream stream);
  // What the stream has been given until now. Requires: use_stream(stream).
  Status record_work(device::CudaStream stream) { return last_.record(stream); }
  cache::Memory& memory() { return *memory_; }
  cache::Memory& pinned() { return *pinned_; }

 private:
  friend class GpuLinear;
  // A matrix product's input or output: on the device, and pinned on the host.
  struct Staged {
    cache::Region device;
    cache::Region host;
  };

  GpuProducts(device::CudaDevice device, device::OwnedCudaStream stream, device::CudaEvent last,
              std::unique_ptr<Cublas> cublas);
  // Makes room for bytes. Requires: nothing is on its way.
  Status reserve(Staged& staged, int64_t bytes);

  device::CudaDevice device_;
  device::OwnedCudaStream stream_;
  device::CudaEvent last_;  // record_work()'s
  std::unique_ptr<Cublas> cublas_;
  std::unique_ptr<cache::Memory> memory_;
  std::unique_ptr<cache::Memory> pinned_;
  cache::Region workspace_;  // cuBLAS': its own could not be captured
  Staged input_;             // [tokens, columns] in the weights' type
  Staged output_;            // [tokens, rows of all parts], f32
};

// Weights on a GPU: the parts one below the other, [num_rows, num_columns].
class GpuLinear final : public Linear {
 public:
  GpuLinear(GpuProducts& gpu, int num_columns, std::vector<LinearPart> parts, DType type);
  // Requires: called once, before anything else.
  Status upload();

  GpuLinear* on_gpu() override { return this; }
  Status multiply(const float* x, int num_tokens, std::span<float* const> outs,
                  Executor& executor) override;

  // Rows on the device: x [num_tokens, num_columns] in type(), out [num_tokens, num_rows], without
  // bias. On its way when it returns. Requires: GpuProducts::use_stream.
  Status multiply_on_gpu(const void* x, int num_tokens, float* out);
  // [num_rows] on the device, zeros for parts without one; null: no part has any.
  const float* bias() const { return reinterpret_cast<const float*>(bias_.data()); }
  int num_rows() const { return num_rows_; }  // of all parts
  DType type() const { return type_; }

 private:
  Status upload_bias();
  Status multiply_strip(const float* x, int num_tokens);
  void hand_out(int first_token, int num_tokens, std::span<float* const> outs) const;

  GpuProducts& gpu_;
  int num_columns_;
  int num_rows_ = 0;
  std::vector<LinearPart> parts_;
  DType type_;
  cache::Region weights_;
  cache::Region bias_;
};

}  // namespace kvx::runner
