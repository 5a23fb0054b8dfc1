// Where kernels count for callers who do not ask.
#include <cuda_runtime.h>

#include "api/device_counters.hpp"
#include "device/cuda_error.hpp"

namespace kvx::boundary {
namespace {

__device__ ops::DeviceCounters ignored;

}  // namespace

Result<ops::DeviceCounters*> ignored_counters() {
  void* address = nullptr;
  KVX_RETURN_IF_ERROR(
      device::cuda_status(cudaGetSymbolAddress(&address, ignored), "cudaGetSymbolAddress"));
  return static_cast<ops::DeviceCounters*>(address);
}

}  // namespace kvx::boundary
