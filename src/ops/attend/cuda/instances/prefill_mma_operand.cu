// Instances of the prefill kernel on mma.sync: packed formats whose scales go into the tiles.
#include "ops/attend/cuda/prefill_launch.hpp"
#include "ops/attend/cuda/prefill_mma.cuh"

namespace kvx::ops::cuda {

KVX_PREFILL_MMA_INSTANCES(MmaF16, kOnOperand)
KVX_PREFILL_MMA_INSTANCES(MmaF16, kOnOperandBesideWide)

}  // namespace kvx::ops::cuda
