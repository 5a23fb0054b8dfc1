// How fast a CUDA device reads its memory, and launches: the yardsticks of kvx bench.
#pragma once

#include "device/cuda.hpp"

namespace kvx::device {

// Launches a kernel that reads [data, data + bytes) once, 16 bytes a thread and step.
// Requires: data on 16 bytes, bytes a multiple of 16; sink is 4 bytes of device memory.
Status cuda_launch_read(const CudaDevice& device, CudaStream stream, const uint8_t* data,
                        int64_t bytes, uint8_t* sink);

// Launches a kernel that copies [from, from + bytes) to `to`. The same requirements.
Status cuda_launch_copy(const CudaDevice& device, CudaStream stream, const uint8_t* from,
                        int64_t bytes, uint8_t* to);

// The driver's own copy between any two places that it can address.
Status cuda_launch_memcpy(CudaStream stream, const void* from, int64_t bytes, void* to);

// Launches a kernel that does nothing.
Status cuda_launch_nothing(CudaStream stream);

}  // namespace kvx::device
