// GpuRows: plain copies that wait; a call's attention is far longer.
#include "runner/gpu_rows.hpp"

namespace kvx::runner {

GpuRows::GpuRows(device::CudaDevice device, device::OwnedCudaStream stream,
                 const ModelConfig& model)
    : device_(std::move(device)),
      stream_(std::move(stream)),
      q_bytes_(int64_t{model.num_q_heads} * model.head_dim * 4),
      kv_bytes_(int64_t{model.num_kv_heads} * model.head_dim * 4) {}

Result<std::unique_ptr<GpuRows>> GpuRows::create(const ModelConfig& model) {
  KVX_ASSIGN_OR_RETURN(device::CudaDevice device, device::open_cuda_device());
  KVX_ASSIGN_OR_RETURN(device::OwnedCudaStream stream, device::OwnedCudaStream::create());
  std::unique_ptr<GpuRows> rows(new GpuRows(std::move(device), std::move(stream), model));
  KVX_ASSIGN_OR_RETURN(rows->memory_, cache::cuda_memory(rows->device_.index));
  const auto allocate = [&rows](cache::Region& region, int64_t bytes) -> Status {
    KVX_ASSIGN_OR_RETURN(region, rows->memory_->allocate(kMaxTokens * bytes, "rows of a call"));
    return {};
  };
  KVX_RETURN_IF_ERROR(allocate(rows->q_, rows->q_bytes_));
  KVX_RETURN_IF_ERROR(allocate(rows->k_, rows->kv_bytes_));
  KVX_RETURN_IF_ERROR(allocate(rows->v_, rows->kv_bytes_));
  KVX_RETURN_IF_ERROR(allocate(rows->out_, rows->q_bytes_));
  return rows;
}

Status GpuRows::put(int num_tokens, const float* q, const float* k, const float* v) {
  KVX_RETURN_IF_ERROR(device::cuda_copy(q_.data(), q, num_tokens * q_bytes_));
  KVX_RETURN_IF_ERROR(device::cuda_copy(k_.data(), k, num_tokens * kv_bytes_));
  return device::cuda_copy(v_.data(), v, num_tokens * kv_bytes_);
}

Status GpuRows::get(int num_tokens, float* out) const {
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(stream_.get()));
  return device::cuda_copy(out, out_.data(), num_tokens * q_bytes_);
}

}  // namespace kvx::runner
