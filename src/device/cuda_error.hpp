// cuda_status: a cudaError_t as a Status. Only files that are built with CUDA include this.
#pragma once

#include <cuda_runtime_api.h>

#include "core/result.hpp"

namespace kvx::device {

// The error is returned here and cleared in the thread, so that a later launch does not find it.
// One that broke the context every later call returns again.
inline Status cuda_status(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return internal_error("{}: {} ({})", call, cudaGetErrorString(error), cudaGetErrorName(error));
}

// After a launch: bad launch parameters, and what an earlier launch left behind.
inline Status cuda_launch_status(const char* kernel) {
  return cuda_status(cudaGetLastError(), kernel);
}

}  // namespace kvx::device
