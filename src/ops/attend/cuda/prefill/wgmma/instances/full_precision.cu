// Instances of the prefill kernel: bf16 and f16.
#include "ops/attend/cuda/prefill/launch.hpp"
#include "ops/attend/cuda/prefill/wgmma/kernel.cuh"

namespace kvx::ops::cuda {

template PrefillKernel wgmma_instance<MmaBf16, PrefillScales::kNone>(const PrefillDims& dims);
template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kNone>(const PrefillDims& dims);

}  // namespace kvx::ops::cuda
