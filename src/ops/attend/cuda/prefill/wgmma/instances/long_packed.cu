// Instances of the prefill kernel: packed formats, rows of more than 128 numbers.
#include "ops/attend/cuda/prefill/launch.hpp"
#include "ops/attend/cuda/prefill/wgmma/kernel.cuh"

namespace kvx::ops::cuda {

template PrefillKernel long_wgmma_instance<MmaF16, PrefillScales::kOnOperand>(
    const PrefillDims& dims);
template PrefillKernel long_wgmma_instance<MmaF16, PrefillScales::kOnOperandBesideFullPrecision>(
    const PrefillDims& dims);
template PrefillKernel long_wgmma_instance<MmaF16, PrefillScales::kOnScores>(
    const PrefillDims& dims);

}  // namespace kvx::ops::cuda
