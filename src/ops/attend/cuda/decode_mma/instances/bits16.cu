// Instances of decode_mma: bf16 and f16.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_TILE_INSTANCES(kBF16, kBF16)
KVX_TILE_INSTANCES(kF16, kF16)

}  // namespace kvx::ops::cuda
