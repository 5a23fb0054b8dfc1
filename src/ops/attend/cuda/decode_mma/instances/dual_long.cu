// Instances of decode_mma: dual-scale formats, rows of 192 and 256 numbers.
#include "ops/attend/cuda/decode_mma/dual/instance.cuh"

namespace kvx::ops::cuda {

KVX_LONG_DUAL_INSTANCE(Int2Dual, Int2Dual)
KVX_LONG_DUAL_INSTANCE(Int2Dual, Int3Dual)
KVX_LONG_DUAL_INSTANCE(Int2Dual, Int4Dual)
KVX_LONG_DUAL_INSTANCE(Int3Dual, Int2Dual)
KVX_LONG_DUAL_INSTANCE(Int3Dual, Int3Dual)
KVX_LONG_DUAL_INSTANCE(Int3Dual, Int4Dual)
KVX_LONG_DUAL_INSTANCE(Int4Dual, Int2Dual)
KVX_LONG_DUAL_INSTANCE(Int4Dual, Int3Dual)
KVX_LONG_DUAL_INSTANCE(Int4Dual, Int4Dual)

}  // namespace kvx::ops::cuda
