// Memory of a CUDA device.
#include "cache/memory.hpp"
#include "device/cuda.hpp"

namespace kvx::cache {
namespace {

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(int device) : device_(device) {}
  MemoryKind kind() const override { return MemoryKind::kCuda; }

 protected:
  uint8_t* allocate_zeroed(int64_t bytes) override {
    const Result<uint8_t*> data = device::cuda_allocate(device_, bytes);
    if (!data.ok()) return nullptr;
    if (!device::cuda_fill(data.value(), 0, bytes).ok()) {
      free(data.value(), bytes);
      return nullptr;
    }
    return data.value();
  }
  void free(uint8_t* data, int64_t) override { device::cuda_free(device_, data); }

 private:
  int device_;
};

}  // namespace

Result<std::unique_ptr<Memory>> cuda_memory(int device) {
  KVX_RETURN_IF_ERROR(device::open_cuda_device(device));
  return std::unique_ptr<Memory>(new CudaMemory(device));
}

}  // namespace kvx::cache
