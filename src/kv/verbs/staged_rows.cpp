// StagedRows: one memory on the host, two with a GPU.
#include "kv/verbs/staged_rows.hpp"

#include "device/cuda_caller.hpp"

namespace kvx::kv {

Result<StagedRows> StagedRows::create(const std::optional<CudaPlacement>& cuda,
                                      int64_t num_floats) {
  constexpr std::string_view kWhat = "rows on their way";
  const int64_t bytes = num_floats * static_cast<int64_t>(sizeof(float));
  StagedRows rows;
  if (!cuda) {
    KVX_ASSIGN_OR_RETURN(rows.on_host_, cache::host_memory().allocate(bytes, kWhat));
    return rows;
  }
  rows.stream_ = cuda->context.stream;
  rows.device_ = cuda->context.device.index;
  KVX_ASSIGN_OR_RETURN(rows.pinned_, cache::pinned_memory(rows.device_));
  KVX_ASSIGN_OR_RETURN(rows.memory_, cache::cuda_memory(rows.device_, rows.stream_));
  KVX_ASSIGN_OR_RETURN(rows.on_host_, rows.pinned_->allocate(bytes, kWhat));
  KVX_ASSIGN_OR_RETURN(rows.placed_, rows.memory_->allocate(bytes, kWhat));
  return rows;
}

Status StagedRows::send() const {
  if (!memory_) return {};
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
  return device::cuda_copy_async(placed_.data(), on_host_.data(), on_host_.bytes(), stream_);
}

Status StagedRows::wait() const {
  if (!memory_) return {};
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
  return device::cuda_synchronize(stream_);
}

}  // namespace kvx::kv
