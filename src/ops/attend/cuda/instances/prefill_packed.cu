// Instances of the prefill kernel: all packed formats, decoded to f16.
#include "ops/attend/cuda/prefill.cuh"
#include "ops/attend/cuda/prefill_launch.hpp"

namespace kvx::ops::cuda {

KVX_PREFILL_INSTANCES(MmaF16, kOnOperand)
KVX_PREFILL_INSTANCES(MmaF16, kOnOperandBesideWide)
KVX_PREFILL_INSTANCES(MmaF16, kOnScores)
KVX_PREFILL_INSTANCE_OF_PARTS(MmaF16)

}  // namespace kvx::ops::cuda
