// Instances of decode_mma: dual-scale formats, K in no fewer bits than V.
#include "ops/attend/cuda/decode_mma/dual/instance.cuh"

namespace kvx::ops::cuda {

KVX_DUAL_INSTANCE(Int2Dual, Int2Dual)
KVX_DUAL_INSTANCE(Int3Dual, Int2Dual)
KVX_DUAL_INSTANCE(Int3Dual, Int3Dual)
KVX_DUAL_INSTANCE(Int4Dual, Int3Dual)
KVX_DUAL_INSTANCE(Int4Dual, Int4Dual)

}  // namespace kvx::ops::cuda
