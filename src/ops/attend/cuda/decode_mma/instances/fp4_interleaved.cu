// Instances of decode_mma: nvfp4 and mxfp4 in interleaved order.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_INTERLEAVED_TILE_INSTANCES(kNvfp4)
KVX_INTERLEAVED_TILE_INSTANCES(kMxfp4)
KVX_INTERLEAVED_TILE_INSTANCES(kMxfp4G16)

}  // namespace kvx::ops::cuda
