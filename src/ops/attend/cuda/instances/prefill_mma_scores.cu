// Instances of the prefill kernel on mma.sync: packed formats whose scales go to the scores.
#include "ops/attend/cuda/prefill_launch.hpp"
#include "ops/attend/cuda/prefill_mma.cuh"

namespace kvx::ops::cuda {

KVX_PREFILL_MMA_INSTANCES(MmaF16, kOnScores)
KVX_PREFILL_MMA_INSTANCE_OF_PARTS(MmaF16)

}  // namespace kvx::ops::cuda
