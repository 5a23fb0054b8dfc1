// decode_row as code of its own, for kernels that have a part for every format of their target:
// each would hold a copy of it. The numbers are gather's.
#pragma once

#include "ops/gather/decode_row.cuh"

namespace kvx::ops::cuda {

static __device__ __noinline__ void decode_row_apart(const CudaSide& side, const RowSource& from,
                                                     float* x, int lane) {
  decode_row(side, from, format::DecodeFor::kGather, x, lane);
}

}  // namespace kvx::ops::cuda
