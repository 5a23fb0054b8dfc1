// Instances of the prefill kernel on mma.sync: packed formats whose scales go to the scores.
#include "ops/attend/cuda/prefill/launch.hpp"
#include "ops/attend/cuda/prefill/mma_sync/kernel.cuh"

namespace kvx::ops::cuda {

template PrefillKernel mma_sync_instance<MmaF16, PrefillScales::kOnScores>(const PrefillDims& dims);
template PrefillKernel mma_sync_instance<MmaF16, PrefillScales::kOnParts>(const PrefillDims& dims);

}  // namespace kvx::ops::cuda
