// Launches that begin before the stream's earlier work has ended (programmatic dependent launch):
// a CTA is there when its turn comes, which is worth about a microsecond a call. Only where the
// kernel's own code can wait for that turn: from compute capability 9.0 on.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device/cuda_error.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops::cuda {

// What follows in the stream may be made ready as soon as every CTA has said so or is done.
__device__ inline void let_later_launches_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Before this nothing may be read or written that earlier work touches.
__device__ inline void wait_for_earlier_work() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The first statement of a kernel that is launched so.
__device__ inline void wait_for_earlier_launches() {
  let_later_launches_begin();
  wait_for_earlier_work();
}

struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes = 0;
};

// Requires: the kernel begins with wait_for_earlier_launches() or wait_for_earlier_work(), and
// takes *job.
inline cudaError_t launch_overlapping(const CudaContext& context, const void* kernel,
                                      const LaunchShape& shape, const void* job) {
  cudaLaunchAttribute overlaps = {};
  overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlaps.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = &overlaps;
  config.numAttrs = device::cuda_code_version(context.device, kernel) >= 90 ? 1 : 0;
  void* arguments[] = {const_cast<void*>(job)};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

template <class Job>
Status launch_overlapping(const CudaContext& context, const char* name, void (*kernel)(Job),
                          const LaunchShape& shape, const std::type_identity_t<Job>& job) {
  return device::cuda_status(
      launch_overlapping(context, reinterpret_cast<const void*>(kernel), shape, &job), name);
}

}  // namespace kvx::ops::cuda
