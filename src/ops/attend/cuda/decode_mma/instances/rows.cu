// Instances of decode_mma: 4 bits with one scale a row.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_TILE_INSTANCES(kFp4Row, kFp4Row)
KVX_TILE_INSTANCES(kInt4Row, kInt4Row)
KVX_PADDED_TILE_INSTANCES(kFp4Row, kFp4Row)
KVX_PADDED_TILE_INSTANCES(kInt4Row, kInt4Row)

}  // namespace kvx::ops::cuda
