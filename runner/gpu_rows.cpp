// GpuRows: one copy there and one back, through pinned memory.
#include "runner/gpu_rows.hpp"

#include <algorithm>
#include <cstring>

#include "device/cuda_async.hpp"

namespace kvx::runner {

GpuRows::GpuRows(device::CudaDevice device, device::OwnedCudaStream stream,
                 const ModelConfig& model)
    : device_(std::move(device)),
      stream_(std::move(stream)),
      q_bytes_(int64_t{model.num_q_heads} * model.head_dim * 4),
      k_bytes_(int64_t{model.num_kv_heads} * model.head_dim * 4),
      v_bytes_(model.is_latent() ? 0 : int64_t{model.num_kv_heads} * model.value_dim * 4),
      out_bytes_(int64_t{model.attended_size()} * 4) {}

Result<std::unique_ptr<GpuRows>> GpuRows::create(const ModelConfig& model) {
  KVX_ASSIGN_OR_RETURN(device::CudaDevice device, device::open_cuda_device());
  KVX_ASSIGN_OR_RETURN(device::OwnedCudaStream stream, device::OwnedCudaStream::create());
  std::unique_ptr<GpuRows> rows(new GpuRows(std::move(device), std::move(stream), model));
  KVX_ASSIGN_OR_RETURN(rows->memory_, cache::cuda_memory(rows->device_.index));
  KVX_ASSIGN_OR_RETURN(rows->pinned_, cache::pinned_memory(rows->device_.index));
  const auto allocate = [&rows](cache::Region& on_device, cache::Region& on_host,
                                int64_t bytes) -> Status {
    KVX_ASSIGN_OR_RETURN(on_device, rows->memory_->allocate(kMaxTokens * bytes, "rows of a call"));
    KVX_ASSIGN_OR_RETURN(on_host, rows->pinned_->allocate(kMaxTokens * bytes, "rows of a call"));
    return {};
  };
  KVX_RETURN_IF_ERROR(
      allocate(rows->rows_, rows->host_rows_, rows->q_bytes_ + rows->k_bytes_ + rows->v_bytes_));
  KVX_RETURN_IF_ERROR(allocate(rows->out_, rows->host_out_, rows->out_bytes_));
  return rows;
}

Status GpuRows::put(int num_tokens, const float* q, const float* k, const float* v) {
  num_tokens_ = num_tokens;
  uint8_t* to = host_rows_.data();
  const auto add = [&](const float* rows, int64_t bytes) {
    std::memcpy(to, rows, static_cast<size_t>(bytes));
    to += bytes;
  };
  add(q, num_tokens * q_bytes_);
  add(k, num_tokens * k_bytes_);
  if (v_bytes_ > 0) add(v, num_tokens * v_bytes_);
  return device::cuda_copy_async(rows_.data(), host_rows_.data(), to - host_rows_.data(),
                                 stream_.get());
}

Status GpuRows::get(int num_tokens, float* out) const {
  const int64_t bytes = num_tokens * out_bytes_;
  KVX_RETURN_IF_ERROR(device::cuda_copy_async(host_out_.data(), out_.data(), bytes, stream_.get()));
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(stream_.get()));
  std::memcpy(out, host_out_.data(), static_cast<size_t>(bytes));
  return {};
}

Result<float*> GpuRows::reserve_to_read(int64_t num_floats) {
  if (num_floats * 4 > to_read_.bytes()) {
    to_read_ = {};
    KVX_ASSIGN_OR_RETURN(to_read_, memory_->allocate(num_floats * 4, "rows that are read back"));
  }
  return reinterpret_cast<float*>(to_read_.data());
}

Status GpuRows::read(int64_t num_floats, float* out) const {
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(stream_.get()));
  return device::cuda_copy(out, to_read_.data(), num_floats * 4);
}

}  // namespace kvx::runner
