// Instances of decode_mma: dual-scale formats of the widths that budgets of bits make beside those
// of dual.cu.
#include "ops/attend/cuda/decode_mma/dual/instance.cuh"

namespace kvx::ops::cuda {

KVX_DUAL_INSTANCE(Int2Dual, Int3Dual)
KVX_DUAL_INSTANCE(Int2Dual, Int4Dual)
KVX_DUAL_INSTANCE(Int3Dual, Int4Dual)
KVX_DUAL_INSTANCE(Int4Dual, Int2Dual)

}  // namespace kvx::ops::cuda
