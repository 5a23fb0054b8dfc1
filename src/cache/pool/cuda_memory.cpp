// Memory of a CUDA device, and pinned memory of the host beside it.
#include "cache/pool/memory.hpp"
#include "core/log.hpp"
#include "device/cuda_async.hpp"
#include "device/cuda_caller.hpp"

namespace kvx::cache {
namespace {

class CudaMemory final : public Memory {
 public:
  CudaMemory(int device, device::CudaStream stream) : device_(device), stream_(stream) {}
  MemoryKind kind() const override { return MemoryKind::kCuda; }
  void clear(uint8_t* data, int64_t bytes) override {
    const Status cleared = fill_with_zeros(data, bytes);
    if (cleared.ok()) return;
    log(LogLevel::kWarning, "blocks keep their bytes: {}", cleared.error().message);
  }

 protected:
  Result<uint8_t*> allocate_zeroed(int64_t bytes) override {
    KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
    KVX_ASSIGN_OR_RETURN(uint8_t * data, device::cuda_allocate(device_, bytes));
    const Status filled = device::cuda_fill(data, 0, bytes);
    if (filled.ok()) return data;
    free(data, bytes);
    return filled.error();
  }
  void free(uint8_t* data, int64_t) override { device::cuda_free(device_, data); }

 private:
  Status fill_with_zeros(uint8_t* data, int64_t bytes) {
    KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
    return device::cuda_fill_async(data, 0, bytes, stream_);
  }

  int device_;
  device::CudaStream stream_;
};

class PinnedMemory final : public Memory {
 public:
  explicit PinnedMemory(int device) : device_(device) {}
  MemoryKind kind() const override { return MemoryKind::kHost; }

 protected:
  Result<uint8_t*> allocate_zeroed(int64_t bytes) override {
    KVX_ASSIGN_OR_RETURN(uint8_t * data, device::cuda_allocate_pinned(device_, bytes));
    clear(data, bytes);
    return data;
  }
  void free(uint8_t* data, int64_t) override { device::cuda_free_pinned(data); }

 private:
  int device_;
};

}  // namespace

Result<std::unique_ptr<Memory>> cuda_memory(int device, device::CudaStream stream) {
  KVX_RETURN_IF_ERROR(device::known_cuda_device(device));
  return std::unique_ptr<Memory>(new CudaMemory(device, stream));
}

Result<std::unique_ptr<Memory>> pinned_memory(int device) {
  KVX_RETURN_IF_ERROR(device::known_cuda_device(device));
  return std::unique_ptr<Memory>(new PinnedMemory(device));
}

}  // namespace kvx::cache
