// The few functions of the CUDA driver that this program needs. Zero is success in all of them.
#include "tools/conformance/cuda_driver.hpp"

#include <cstdint>

#include "tools/conformance/system.hpp"

namespace kvx::conformance {

std::optional<CudaDriver> CudaDriver::open() {
  void* library = open_library(cuda_library());
  if (library == nullptr) return std::nullopt;
  bool has_all = true;
  const auto find = [&](const char* name, auto& function) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol_of(library, name));
    has_all = has_all && function != nullptr;
  };
  int (*init)(unsigned) = nullptr;
  int (*get_device)(int*, int) = nullptr;
  int (*retain_context)(void**, int) = nullptr;
  int (*set_context)(void*) = nullptr;
  CudaDriver driver;
  find("cuInit", init);
  find("cuDeviceGet", get_device);
  find("cuDevicePrimaryCtxRetain", retain_context);
  find("cuCtxSetCurrent", set_context);
  find("cuMemAlloc_v2", driver.allocate_);
  find("cuMemAllocManaged", driver.allocate_managed_);
  find("cuMemcpyHtoD_v2", driver.copy_to_device_);
  find("cuMemcpyDtoH_v2", driver.copy_to_host_);
  find("cuCtxSynchronize", driver.synchronize_);
  int device = 0;
  void* context = nullptr;
  const bool is_ready = has_all && init(0) == 0 && get_device(&device, 0) == 0 &&
                        retain_context(&context, device) == 0 && set_context(context) == 0;
  return is_ready ? std::optional(driver) : std::nullopt;
}

void* CudaDriver::allocate(size_t num_bytes, bool is_managed) const {
  constexpr unsigned kAttachGlobal = 1;
  DevicePointer pointer = 0;
  const int status = is_managed ? allocate_managed_(&pointer, num_bytes, kAttachGlobal)
                                : allocate_(&pointer, num_bytes);
  return status == 0 ? reinterpret_cast<void*>(static_cast<uintptr_t>(pointer)) : nullptr;
}

bool CudaDriver::copy_to_device(void* device, const void* host, size_t num_bytes) const {
  return copy_to_device_(reinterpret_cast<uintptr_t>(device), host, num_bytes) == 0;
}

bool CudaDriver::copy_to_host(void* host, const void* device, size_t num_bytes) const {
  return copy_to_host_(host, reinterpret_cast<uintptr_t>(device), num_bytes) == 0;
}

bool CudaDriver::synchronize() const {
  return synchronize_() == 0;
}

}  // namespace kvx::conformance
