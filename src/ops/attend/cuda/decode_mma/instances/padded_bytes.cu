// Instances of the tensor cores' kernel for rows of up to 128 or 256 numbers: 16 and 8 bits.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_PADDED_TILE_INSTANCES(kBF16, kBF16)
KVX_PADDED_TILE_INSTANCES(kF16, kF16)
KVX_PADDED_TILE_INSTANCES(kFp8E4M3, kFp8E4M3)
KVX_PADDED_TILE_INSTANCES(kFp8E5M2, kFp8E5M2)
KVX_PADDED_TILE_INSTANCES(kInt8, kInt8)
KVX_PADDED_TILE_INSTANCES(kInt8Affine, kInt8Affine)

}  // namespace kvx::ops::cuda
