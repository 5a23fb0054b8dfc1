// CudaContext: what a CUDA verb runs with. The verbs take the CPU's argument structs; every pointer
// in them, to rows, tables, lengths or blocks, is then one that the device can read.
#pragma once

#include "device/cuda.hpp"
#include "ops/cuda/device_counters.hpp"

namespace kvx::ops {

// A verb launches on the stream and returns; errors of a launch that has begun are the stream's
// (device::cuda_synchronize).
struct CudaContext {
  device::CudaDevice device;
  device::CudaStream stream = nullptr;
};

}  // namespace kvx::ops
