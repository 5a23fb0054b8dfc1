// Instances of the prefill kernel: all packed formats, decoded to f16.
#include "ops/attend/cuda/prefill/launch.hpp"
#include "ops/attend/cuda/prefill/wgmma/kernel.cuh"

namespace kvx::ops::cuda {

template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kOnOperand>(const PrefillDims& dims);
template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kOnOperandBesideFullPrecision>(
    const PrefillDims& dims);
template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kOnScores>(const PrefillDims& dims);
template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kOnParts>(const PrefillDims& dims);

}  // namespace kvx::ops::cuda
