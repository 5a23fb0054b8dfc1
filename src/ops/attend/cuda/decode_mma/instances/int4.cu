// Instances of decode_mma: int4, symmetric and affine.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_TILE_INSTANCES(kInt4, kInt4)
KVX_TILE_INSTANCES(kInt4Affine, kInt4Affine)

}  // namespace kvx::ops::cuda
