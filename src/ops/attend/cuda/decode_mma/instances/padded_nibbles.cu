// Instances of the tensor cores' kernel for rows of up to 128 or 256 numbers: 4 bits, and mixed.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_PADDED_TILE_INSTANCES(kInt4, kInt4)
KVX_PADDED_TILE_INSTANCES(kInt4Affine, kInt4Affine)
KVX_PADDED_TILE_INSTANCES(kMxfp4G16, kMxfp4G16)
KVX_PADDED_TILE_INSTANCES(kMxfp4, kMxfp4)
KVX_PADDED_TILE_INSTANCES(kNvfp4, kNvfp4)
KVX_PADDED_TILE_INSTANCES(kInt8, kInt4)
KVX_PADDED_TILE_INSTANCES(kFp8E4M3, kNvfp4)
KVX_PADDED_TILE_INSTANCES(kBF16, kInt4)

}  // namespace kvx::ops::cuda
