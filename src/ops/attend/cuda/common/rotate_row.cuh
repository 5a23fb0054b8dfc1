// hadamard_row for the usual lengths of a row, in registers. By one warp.
#pragma once

#include "ops/cuda/transform_row.cuh"

namespace kvx::ops::cuda {

// Lane l has numbers 64 b + 2 l and the next.
template <int Blocks>
__device__ void rotate_blocks(float* row, int lane) {
  constexpr int kBlock = hadamard_block(Blocks * 64);
  auto* pairs = reinterpret_cast<float2*>(row);
  float2 x[Blocks];
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
    x[b] = pairs[b * kWarp + lane];
    butterfly(x[b].x, x[b].y);
  }
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const float sign = (lane & lanes) == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
      x[b].x = sign * x[b].x + __shfl_xor_sync(kWholeWarp, x[b].x, lanes);
      x[b].y = sign * x[b].y + __shfl_xor_sync(kWholeWarp, x[b].y, lanes);
    }
  }
#pragma unroll
  for (int step = 1; step < kBlock / 64; step *= 2) {
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
      if ((b & step) != 0) continue;
      butterfly(x[b].x, x[b + step].x);
      butterfly(x[b].y, x[b + step].y);
    }
  }
  const float norm = hadamard_norm(kBlock);
#pragma unroll
  for (int b = 0; b < Blocks; ++b) pairs[b * kWarp + lane] = {x[b].x * norm, x[b].y * norm};
  __syncwarp();
}

// row: shared memory, [dim], on 8 bytes.
__device__ inline void rotate_row(float* row, int dim, int lane) {
  if (dim == 256) {
    rotate_blocks<4>(row, lane);
  } else if (dim == 128) {
    rotate_blocks<2>(row, lane);
  } else if (dim == 64) {
    rotate_blocks<1>(row, lane);
  } else {
    hadamard_row(row, dim, lane);
  }
}

// The same where neighbouring lanes have a row's numbers, four each. By whole warps.
template <int Dim>
__device__ void rotate_quads(float4& x) {
  static_assert(hadamard_block(Dim) == Dim && Dim / 4 <= kWarp);
  const int lane = threadIdx.x % kWarp;
  butterfly(x.x, x.y);
  butterfly(x.z, x.w);
  butterfly(x.x, x.z);
  butterfly(x.y, x.w);
#pragma unroll 1
  for (int lanes = 1; lanes < Dim / 4; lanes *= 2) {
    const float sign = (lane & lanes) == 0 ? 1.0f : -1.0f;
    x.x = sign * x.x + __shfl_xor_sync(kWholeWarp, x.x, lanes);
    x.y = sign * x.y + __shfl_xor_sync(kWholeWarp, x.y, lanes);
    x.z = sign * x.z + __shfl_xor_sync(kWholeWarp, x.z, lanes);
    x.w = sign * x.w + __shfl_xor_sync(kWholeWarp, x.w, lanes);
  }
  const float norm = hadamard_norm(Dim);
  x = {x.x * norm, x.y * norm, x.z * norm, x.w * norm};
}

}  // namespace kvx::ops::cuda
