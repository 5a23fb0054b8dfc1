// CudaContext: what a CUDA verb runs with. The verbs take the CPU's argument structs; every pointer
// in them, to rows, tables, lengths or blocks, is then one that the device can read.
#pragma once

#include "device/cuda.hpp"

namespace kvx::ops {

// A verb launches on the stream and returns; errors of a launch that has begun are the stream's
// (device::cuda_synchronize).
struct CudaContext {
  device::CudaDevice device;
  device::CudaStream stream = nullptr;
};

// What kernels found wrong, since the host cannot read its arguments: such tokens, ranges and
// blocks are skipped, nothing out of range is read or written. In device memory, zeroed by the
// caller, added to by every call.
struct CudaFindings {
  unsigned long long out_of_range = 0;      // slots, block ids, lengths, positions
  unsigned long long nonfinite_inputs = 0;  // AppendReport
};

}  // namespace kvx::ops
