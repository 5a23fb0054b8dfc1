// What a launch must ask of CUDA about its kernel first. Only files that are built with CUDA
// include this.
#pragma once

#include <cuda_runtime_api.h>

namespace kvx::device {

// Allows a kernel as much dynamic shared memory on the current device, whose index is given. CUDA
// is asked once a thread. What is allowed belongs to the kernel, which other threads launch too:
// callers give the most that they will ever ask of it.
cudaError_t allow_shared_bytes(int device, const void* kernel, int bytes);

}  // namespace kvx::device
