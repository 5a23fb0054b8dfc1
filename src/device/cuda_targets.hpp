// What kernels were compiled for, and which devices run them. Known without a device, so tested
// without one.
#pragma once

#include <string_view>

#include "device/cuda.hpp"

namespace kvx::device {

inline constexpr int kOldestCudaMajor = 8;  // compute capability 8.0: bf16 products, cp.async

// targets: of KVX_CUDA_TARGETS (cmake/cuda.cmake), separated by spaces. Machine code runs on its
// own major number from its minor number on ("80"), on its own capability alone ("90a") or on its
// family ("100f"), PTX ("80-virtual") on all that is as new; "80-on-90" is machine code for 9.0.
bool cuda_targets_run_on(std::string_view targets, int major, int minor);

// UNSUPPORTED, with both capabilities: a device older than kOldestCudaMajor, or one that does not
// run these targets.
Status check_has_kernels(const CudaDevice& device, std::string_view targets);

}  // namespace kvx::device
