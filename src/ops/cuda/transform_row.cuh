// A row's transform by one warp, in shared memory (docs/numbers.md, section 6).
#pragma once

#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

// A Hadamard transform's step on two numbers.
__device__ inline void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// 1 / sqrt(n) rounded to binary32. Requires: n is a power of two.
__device__ inline float hadamard_norm(int n) {
  float norm = 1.0f;
  for (; n >= 4; n /= 4) norm *= 0.5f;
  return n == 2 ? norm * 0x1.6A09E6p-1f : norm;
}

// In place. The butterfly's pairs of one stride do not depend on each other; strides go in order.
__device__ inline void hadamard_row(float* x, int head_dim, int lane) {
  const int n = hadamard_block(head_dim);
  const int num_pairs = head_dim / 2;
  for (int stride = 1; stride < n; stride *= 2) {
    __syncwarp();
    for (int pair = lane; pair < num_pairs; pair += kWarp) {
      const int first = pair / stride * (2 * stride) + pair % stride;
      butterfly(x[first], x[first + stride]);
    }
  }
  const float norm = hadamard_norm(n);
  __syncwarp();
  for (int d = lane; d < head_dim; d += kWarp) x[d] *= norm;
  __syncwarp();
}

// The rows of a transform's tables that belong to a head and a block of positions; null where a
// term is absent.
struct TransformRow {
  const float* mean;
  const float* offset;
  const float* factor;
  bool hadamard;
};

__device__ inline TransformRow transform_row(const SideTransform& transform, int head,
                                             int num_kv_heads, int head_dim, int64_t block) {
  const int64_t at = int64_t{head} * head_dim;
  const int64_t offset_at = block * num_kv_heads * head_dim + at;
  return {transform.mean ? transform.mean + at : nullptr,
          transform.block_offset ? transform.block_offset + offset_at : nullptr,
          transform.factor ? transform.factor + at : nullptr, transform.hadamard};
}

__device__ inline void apply_transform_row(const TransformRow& row, float* x, int head_dim,
                                           int lane) {
  for (int d = lane; d < head_dim; d += kWarp) {
    float t = x[d];
    if (row.mean) t -= row.mean[d];
    if (row.offset) t -= row.offset[d];
    if (row.factor) t *= row.factor[d];
    x[d] = t;
  }
  if (row.hadamard) hadamard_row(x, head_dim, lane);
}

__device__ inline void undo_transform_row(const TransformRow& row, float* x, int head_dim,
                                          int lane) {
  if (row.hadamard) hadamard_row(x, head_dim, lane);
  for (int d = lane; d < head_dim; d += kWarp) {
    float t = x[d];
    if (row.factor) t /= row.factor[d];
    if (row.offset) t += row.offset[d];
    if (row.mean) t += row.mean[d];
    x[d] = t;
  }
}

}  // namespace kvx::ops::cuda
