// Which of the attention kernels takes a call on a GPU, and which instance of it.
#pragma once

#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cuda/prefill/launch.hpp"

namespace kvx::ops::cuda {

inline bool is_prefill(CudaAttendPath path) {
  return path == CudaAttendPath::kPrefill || path == CudaAttendPath::kPrefillMma;
}

// The decode_mma kernel's instance for a run. num_rows: query rows of a sequence and KV head.
DecodeMmaKernel decode_mma_kernel_for(const CudaContext& context, const AttendArgs& args,
                                      const HeadRun& run, int64_t num_rows);
// A prefill kernel's. Requires: is_prefill(path).
PrefillKernel prefill_kernel_for(const CudaContext& context, const AttendArgs& args,
                                 const HeadRun& run, CudaAttendPath path);

// Whether a kernel takes the call.
bool takes(CudaAttendPath path, const CudaContext& context, const AttendArgs& args);

// The fastest that takes the call. num_rows: as above.
CudaAttendPath choose_path(const CudaContext& context, const AttendArgs& args, int64_t num_rows);

}  // namespace kvx::ops::cuda
