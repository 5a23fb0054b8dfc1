// append's reference kernel: a warp a row, in shared memory. It takes every head_dim, address and
// encoder option.
#pragma once

#include "ops/append/append_params.cuh"
#include "ops/cuda/floats.cuh"
#include "ops/cuda/rows_launch.hpp"

namespace kvx::ops::cuda {

// encode: encode_row, or encode_row_apart.
template <class Encode>
__device__ inline void append_row(const AppendParams& params, const AppendSide& part,
                                  uint32_t token, int head, float* x, int lane,
                                  const Encode& encode) {
  const CudaSide& side = part.side;
  const AppendTarget target =
      append_target(params, part, token, params.slot_mapping[token], lane == 0 && head == 0);
  if (!target.is_stored) return;
  const uint8_t* input = part.input_row(token, params.first_head + head);
  RowTarget to = target.row(side, head);
  to.feedback = side.view.feedback_of(head);
  if (part.keeps_bits) {
    for (int i = lane; i < side.code_bytes; i += kWarp) to.codes[i] = input[i];
    return;
  }
  __syncwarp();
  for (int d = lane; d < side.view.head_dim; d += kWarp) {
    x[d] = load_float(part.input.dtype, input, d);
  }
  apply_transform_row(append_transform(params, part, head, target.position_block), x,
                      side.view.head_dim, lane);
  count_nonfinite(params, encode(side, to, x, lane));
}

// blockIdx.y: K or V.
__global__ void __launch_bounds__(RowsLaunch::kThreads)
    append_rows(const __grid_constant__ AppendParams params) {
  extern __shared__ float shared[];
  const AppendSide& part = params.sides[blockIdx.y];
  if (!part.is_stored()) return;
  const int lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const uint32_t warps_per_cta = RowsLaunch::kThreads / kWarp;
  float* x = shared + warp * static_cast<uint32_t>(part.side.view.head_dim);
  const auto num_heads = static_cast<uint32_t>(params.num_heads);
  for (uint32_t row = blockIdx.x * warps_per_cta + warp; row < params.num_tokens * num_heads;
       row += gridDim.x * warps_per_cta) {
    append_row(params, part, row / num_heads, static_cast<int>(row % num_heads), x, lane,
               encode_row);
  }
}

}  // namespace kvx::ops::cuda
