// CudaDriver: device memory through its driver, loaded at run time, so that this program
// needs CUDA neither to be built nor to run.
#pragma once

#include <cstddef>
#include <optional>

namespace kvx::conformance {

class CudaDriver {
 public:
  // Empty when this machine has no driver or no device. Requires: no later fork() whose child uses
  // the device.
  static std::optional<CudaDriver> open();

  void* allocate(size_t num_bytes, bool is_managed) const;  // null: no memory
  bool copy_to_device(void* device, const void* host, size_t num_bytes) const;
  bool copy_to_host(void* host, const void* device, size_t num_bytes) const;
  bool synchronize() const;

 private:
  using DevicePointer = unsigned long long;  // CUdeviceptr

  int (*allocate_)(DevicePointer*, size_t) = nullptr;
  int (*allocate_managed_)(DevicePointer*, size_t, unsigned) = nullptr;
  int (*copy_to_device_)(DevicePointer, const void*, size_t) = nullptr;
  int (*copy_to_host_)(void*, DevicePointer, size_t) = nullptr;
  int (*synchronize_)() = nullptr;
};

}  // namespace kvx::conformance
