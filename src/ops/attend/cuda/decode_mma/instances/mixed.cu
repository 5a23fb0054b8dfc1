// Instances of decode_mma: K and V of different formats.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_TILE_INSTANCES(kInt8, kInt4)
KVX_TILE_INSTANCES(kFp8E4M3, kNvfp4)
KVX_TILE_INSTANCES(kBF16, kInt4)

}  // namespace kvx::ops::cuda
