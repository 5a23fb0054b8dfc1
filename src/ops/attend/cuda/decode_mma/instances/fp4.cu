// Instances of decode_mma: nvfp4 and mxfp4.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_TILE_INSTANCES(kNvfp4, kNvfp4)
KVX_TILE_INSTANCES(kMxfp4, kMxfp4)
KVX_TILE_INSTANCES(kMxfp4G16, kMxfp4G16)

}  // namespace kvx::ops::cuda
