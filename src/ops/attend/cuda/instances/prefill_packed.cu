// Instances of the prefill kernel: all packed formats, decoded to f16.
#include "ops/attend/cuda/prefill.cuh"
#include "ops/attend/cuda/prefill_launch.hpp"

namespace kvx::ops::cuda {

template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kOnOperand>(int head_dim);
template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kOnOperandBesideWide>(int head_dim);
template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kOnScores>(int head_dim);
template PrefillKernel wgmma_instance<MmaF16, PrefillScales::kOnParts>(int head_dim);

}  // namespace kvx::ops::cuda
