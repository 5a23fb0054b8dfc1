// GpuRows: q, k, v and the output of one call on a GPU, for a model whose products are the host's.
#pragma once

#include <memory>

#include "kv/verbs/cuda_place.hpp"
#include "runner/model_config.hpp"

namespace kvx::runner {

class GpuRows {
 public:
  static constexpr int kMaxTokens = 512;  // of a call

  // The first device. UNSUPPORTED as device::open_cuda_device.
  static Result<std::unique_ptr<GpuRows>> create(const ModelConfig& model);

  // For the cache that the rows go to.
  kv::CudaPlacement placement() const { return {{device_, stream_.get()}, kMaxTokens}; }

  // [num_tokens, heads, head_dim] each, as a model has them. Returns when they are on their way.
  // Requires: num_tokens <= kMaxTokens.
  Status put(int num_tokens, const float* q, const float* k, const float* v);
  // Waits for the stream.
  Status get(int num_tokens, float* out) const;

  // Room on the device for what is to be read back, until the next call.
  Result<float*> reserve_to_read(int64_t num_floats);
  // Its first num_floats. Waits for the stream.
  Status read(int64_t num_floats, float* out) const;

  // Of the last put(), on the device.
  const float* q() const { return reinterpret_cast<const float*>(rows_.data()); }
  const float* k() const { return q() + num_tokens_ * q_bytes_ / 4; }
  const float* v() const { return k() + num_tokens_ * k_bytes_ / 4; }
  float* out() const { return reinterpret_cast<float*>(out_.data()); }

 private:
  GpuRows(device::CudaDevice device, device::OwnedCudaStream stream, const ModelConfig& model);

  device::CudaDevice device_;
  device::OwnedCudaStream stream_;
  int64_t q_bytes_;  // of a token
  int64_t k_bytes_;
  int64_t v_bytes_;  // 0 in a latent model
  int64_t out_bytes_;
  int64_t num_tokens_ = 0;
  std::unique_ptr<cache::Memory> memory_;
  std::unique_ptr<cache::Memory> pinned_;
  // [q of all tokens][k][v], which pass in one copy.
  cache::Region rows_, host_rows_;
  cache::Region out_, host_out_;
  cache::Region to_read_;  // on the device
};

}  // namespace kvx::runner
