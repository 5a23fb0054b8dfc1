// Instances of the prefill kernel: bf16 and f16.
#include "ops/attend/cuda/prefill.cuh"
#include "ops/attend/cuda/prefill_launch.hpp"

namespace kvx::ops::cuda {

KVX_PREFILL_INSTANCES(MmaBf16, kNone)
KVX_PREFILL_INSTANCES(MmaF16, kNone)

}  // namespace kvx::ops::cuda
