// A row's end: its weighted sum over all tokens becomes the output. The sink joins the softmax, V's
// transform is undone, output and log-sum-exp are stored. By one warp.
#pragma once

#include "ops/attend/cuda/common/params.cuh"
#include "ops/attend/cuda/common/rotate_row.cuh"

namespace kvx::ops::cuda {

// V's transform undone on a row's weighted sums, numbers d to d + 3; store_output_quad follows.
// weights: their sum. By a warp, whose neighbouring lanes have a row's neighbouring numbers; lanes
// behind the row's end go along.
template <int Dim>
__device__ float4 undo_transform(const BatchParams& params, int q_head, int d, float weights,
                                 float4 x) {
  const TransformRow v =
      transform_row(params.transform_v, q_head / params.q_per_kv, params.num_kv_heads, Dim, 0);
  if (v.hadamard) rotate_quads<Dim>(x);
  d = min(d, Dim - 4);
  if (v.factor) {
    const float* factor = v.factor + d;
    x = {__fdividef(x.x, factor[0]), __fdividef(x.y, factor[1]), __fdividef(x.z, factor[2]),
         __fdividef(x.w, factor[3])};
  }
  if (v.mean) {
    const float* mean = v.mean + d;
    x = {x.x + weights * mean[0], x.y + weights * mean[1], x.z + weights * mean[2],
         x.w + weights * mean[3]};
  }
  return x;
}

// sums: shared memory, [dim], on 16 bytes; they are overwritten.
__device__ inline void finish_row(const BatchParams& params, int64_t token, int q_head,
                                  const Softmax2& tokens, float* sums, int lane) {
  const int dim = params.value_dim;
  const Softmax2 whole = with_sink(params, q_head, tokens);
  const float to_whole = share_of(tokens, whole);
  for (int d = lane; d < dim; d += kWarp) sums[d] = tokens.sum == 0 ? 0.0f : sums[d] * to_whole;
  __syncwarp();
  const TransformRow v =
      transform_row(params.transform_v, q_head / params.q_per_kv, params.num_kv_heads, dim, 0);
  if (v.hadamard) rotate_row(sums, dim, lane);
  const float probability = tokens.sum * to_whole;
  uint8_t* target = output_row(params, token, q_head);
  for (int d = lane; d < dim; d += kWarp) {
    float x = sums[d];
    if (v.factor) x /= v.factor[d];
    if (v.mean) x += probability * v.mean[d];
    store_float(params.out.dtype, x, target, d);
  }
  if (params.lse && lane == 0) {
    params.lse[token * params.num_q_heads + q_head] = log_sum_exp(whole);
  }
}

}  // namespace kvx::ops::cuda
