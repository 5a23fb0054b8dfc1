// Instances of decode_mma: fp8.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_TILE_INSTANCES(kFp8E4M3, kFp8E4M3)
KVX_TILE_INSTANCES(kFp8E5M2, kFp8E5M2)

}  // namespace kvx::ops::cuda
