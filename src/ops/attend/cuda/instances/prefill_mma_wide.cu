// Instances of the prefill kernel on mma.sync: bf16 and f16.
#include "ops/attend/cuda/prefill_launch.hpp"
#include "ops/attend/cuda/prefill_mma.cuh"

namespace kvx::ops::cuda {

KVX_PREFILL_MMA_INSTANCES(MmaBf16, kNone)
KVX_PREFILL_MMA_INSTANCES(MmaF16, kNone)

}  // namespace kvx::ops::cuda
