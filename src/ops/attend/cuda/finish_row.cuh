// A row's end: its weighted sum over all tokens becomes the output. The sink joins the softmax, V's
// transform is undone, output and log-sum-exp are stored. By one warp.
#pragma once

#include "ops/attend/cuda/job.cuh"
#include "ops/cuda/transform_row.cuh"

namespace kvx::ops::cuda {

// hadamard_row in registers: lane l has numbers 64 b + 2 l and the next.
template <int Blocks>
__device__ void rotate_row(float* row, int lane) {
  constexpr int kBlock = hadamard_block(Blocks * 64);
  auto* pairs = reinterpret_cast<float2*>(row);
  float2 x[Blocks];
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
    const float2 pair = pairs[b * kWarp + lane];
    x[b] = {pair.x + pair.y, pair.x - pair.y};
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
      const float2 first = x[b], second = x[b + step];
      x[b] = {first.x + second.x, first.y + second.y};
      x[b + step] = {first.x - second.x, first.y - second.y};
    }
  }
  const float norm = hadamard_norm(kBlock);
#pragma unroll
  for (int b = 0; b < Blocks; ++b) pairs[b * kWarp + lane] = {x[b].x * norm, x[b].y * norm};
  __syncwarp();
}

// sums: shared memory, [dim], on 16 bytes; they are overwritten.
__device__ inline void finish_row(const AttendJob& job, int64_t token, int q_head,
                                  const Softmax2& tokens, float* sums, int lane) {
  const int dim = job.packed.v.view.head_dim;
  const Softmax2 whole = with_sink(job, q_head, tokens);
  const float to_whole = share_of(tokens, whole);
  for (int d = lane; d < dim; d += kWarp) sums[d] = tokens.sum == 0 ? 0.0f : sums[d] * to_whole;
  __syncwarp();
  const TransformRow v =
      transform_row(job.args.transform.v, q_head / job.q_per_kv, job.num_kv_heads, dim, 0);
  if (v.hadamard) {
    if (dim == 256) {
      rotate_row<4>(sums, lane);
    } else if (dim == 128) {
      rotate_row<2>(sums, lane);
    } else if (dim == 64) {
      rotate_row<1>(sums, lane);
    } else {
      hadamard_row(sums, dim, lane);
    }
  }
  const float probability = tokens.sum * to_whole;
  uint8_t* target = output_row(job, token, q_head);
  for (int d = lane; d < dim; d += kWarp) {
    float x = sums[d];
    if (v.factor) x /= v.factor[d];
    if (v.mean) x += probability * v.mean[d];
    store_float(job.args.out.dtype, x, target, d);
  }
  if (job.args.lse && lane == 0) {
    job.args.lse[token * job.args.num_q_heads + q_head] = log_sum_exp(whole);
  }
}

}  // namespace kvx::ops::cuda
