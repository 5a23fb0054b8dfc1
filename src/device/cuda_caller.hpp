// What serving somebody else's pointers needs of CUDA: which memory an address lies in, which
// device may serve it, and leaving the thread's current device as it was.
#pragma once

#include <string_view>

#include "device/cuda.hpp"

namespace kvx::device {

// The device, as open_cuda_device finds it; looked up once a process, and not made current.
Result<const CudaDevice*> known_cuda_device(int index);

// UNSUPPORTED, with the reason: no device of this machine has kernels in this build.
Status check_usable_cuda_device();

enum class CudaMemoryKind : uint8_t {
  kHost,     // not registered with CUDA
  kPinned,   // of the host, for devices too
  kDevice,   // of one device
  kManaged,  // of the host and all devices
};
constexpr std::string_view name_of(CudaMemoryKind kind) {
  constexpr std::string_view kNames[] = {"the host's", "the host's, pinned", "a device's",
                                         "managed"};
  return kNames[static_cast<int>(kind)];
}

struct CudaAddress {
  CudaMemoryKind kind = CudaMemoryKind::kHost;
  int device = 0;  // of kDevice
};

Result<CudaAddress> find_cuda_address(const void* address);

// The thread's current device.
Result<int> current_cuda_device();

// Makes a device the thread's current one until the end of a scope.
class CurrentCudaDevice {
 public:
  static Result<CurrentCudaDevice> set(int index);
  CurrentCudaDevice(CurrentCudaDevice&& other) noexcept;
  CurrentCudaDevice& operator=(CurrentCudaDevice&&) = delete;
  ~CurrentCudaDevice();

 private:
  explicit CurrentCudaDevice(int previous) : previous_(previous) {}
  [[maybe_unused]] int previous_;  // -1: nothing to restore
};

}  // namespace kvx::device
