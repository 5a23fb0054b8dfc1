// Instances of decode_mma: 4 bits with one scale a row, in binary32 or by tokens and heads.
#include "ops/attend/cuda/decode_mma/formats.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

KVX_WORD_SCALE_INSTANCES(kFp4Row)
KVX_WORD_SCALE_INSTANCES(kInt4Row)

}  // namespace kvx::ops::cuda
