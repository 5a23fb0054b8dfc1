// Instances of the prefill kernel: packed formats, rows of more than 128 numbers.
#include "ops/attend/cuda/prefill.cuh"
#include "ops/attend/cuda/prefill_launch.hpp"

namespace kvx::ops::cuda {

template PrefillKernel long_wgmma_instance<MmaF16, PrefillScales::kOnOperand>(
    const PrefillDims& dims);
template PrefillKernel long_wgmma_instance<MmaF16, PrefillScales::kOnOperandBesideWide>(
    const PrefillDims& dims);
template PrefillKernel long_wgmma_instance<MmaF16, PrefillScales::kOnScores>(
    const PrefillDims& dims);

}  // namespace kvx::ops::cuda
