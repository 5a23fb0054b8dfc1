// Copies between host memory and a device's, by CUDA.
#include "cache/pool/memory_copy.hpp"

#include "device/cuda.hpp"

namespace kvx::cache {

Status copy_device_memory(uint8_t* to, const uint8_t* from, int64_t bytes) {
  return device::cuda_copy(to, from, bytes);
}

}  // namespace kvx::cache
