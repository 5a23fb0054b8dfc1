// append_row: a row by a warp, in shared memory, for append's reference kernel and beside error
// feedback. It takes every head_dim, address and encoder option.
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
    for (int i = lane; i < side.code_bytes; i += kWarp) {
      to.codes[byte_of_row(side.view.codes, i)] = input[i];
    }
    return;
  }
  __syncwarp();
  for (int d = lane; d < side.view.head_dim; d += kWarp) {
    x[d] = load_float(part.input.dtype, input, d);
  }
  apply_transform_row(append_transform(params, part, head, target.position_block), x,
                      side.view.head_dim, lane);
  count_lost(params.counters, side, head, encode(side, to, x, lane));
}

}  // namespace kvx::ops::cuda
