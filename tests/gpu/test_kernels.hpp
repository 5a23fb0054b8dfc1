// Kernels of the tests' own, on a context's stream. Each launch returns CUDA's text if it failed.
#pragma once

#include <string>

#include "ops/cuda/context.hpp"

namespace kvx::tests {

#if KVX_HAS_CUDA

// Fills the shared memory of every multiprocessor with NaNs: what an earlier launch may have left,
// made as bad as it can be. A kernel that reads memory which it did not write then shows it.
std::string poison_shared_memory(const ops::CudaContext& context);

// The architecture that the kernel which runs was compiled for, 90 for 9.0.
std::string tell_code_version(const ops::CudaContext& context, int* on_device);
const void* kernel_that_reports_code_version();

// Launches a kernel that fails: no call of this process reaches the device after that. CUDA's text.
std::string break_context(const ops::CudaContext& context);

#else  // no test gets here: GpuTest has found no device

inline constexpr char kNoKernels[] = "this build has no kernels";
inline std::string poison_shared_memory(const ops::CudaContext&) {
  return kNoKernels;
}
inline std::string tell_code_version(const ops::CudaContext&, int*) {
  return kNoKernels;
}
inline const void* kernel_that_reports_code_version() {
  return nullptr;
}
inline std::string break_context(const ops::CudaContext&) {
  return kNoKernels;
}

#endif

}  // namespace kvx::tests
