// Instances of decode_mma: int8, symmetric and affine.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_TILE_INSTANCES(kInt8, kInt8)
KVX_TILE_INSTANCES(kInt8Affine, kInt8Affine)

}  // namespace kvx::ops::cuda
