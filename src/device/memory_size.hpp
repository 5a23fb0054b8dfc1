// How much memory there is, for budgets that are a share of it.
#pragma once

#include <cstdint>

#include "core/result.hpp"

namespace kvx::device {

// Of the machine, in use or not.
int64_t host_memory_bytes();
// Of a CUDA device, free now. Errors as open_cuda_device's.
Result<int64_t> cuda_free_bytes(int device);

}  // namespace kvx::device
