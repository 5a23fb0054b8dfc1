// Copies between host memory and a device's.
#pragma once

#include <cstdint>

#include "core/result.hpp"

namespace kvx::cache {

// Waits until it is done; either side may be on a device. Errors as device::cuda_copy.
Status copy_device_memory(uint8_t* to, const uint8_t* from, int64_t bytes);

}  // namespace kvx::cache
