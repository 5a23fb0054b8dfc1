// Instances of the prefill kernel on mma.sync: bf16 and f16.
#include "ops/attend/cuda/prefill/launch.hpp"
#include "ops/attend/cuda/prefill/mma_sync/kernel.cuh"

namespace kvx::ops::cuda {

template PrefillKernel mma_sync_instance<MmaBf16, PrefillScales::kNone>(const PrefillDims& dims);
template PrefillKernel mma_sync_instance<MmaF16, PrefillScales::kNone>(const PrefillDims& dims);

}  // namespace kvx::ops::cuda
