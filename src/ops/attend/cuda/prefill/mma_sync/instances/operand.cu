// Instances of the prefill kernel on mma.sync: packed formats whose scales go into the tiles.
#include "ops/attend/cuda/prefill/launch.hpp"
#include "ops/attend/cuda/prefill/mma_sync/kernel.cuh"

namespace kvx::ops::cuda {

template PrefillKernel mma_sync_instance<MmaF16, PrefillScales::kOnOperand>(
    const PrefillDims& dims);
template PrefillKernel mma_sync_instance<MmaF16, PrefillScales::kOnOperandBesideFullPrecision>(
    const PrefillDims& dims);

}  // namespace kvx::ops::cuda
