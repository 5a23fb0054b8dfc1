// copy_blocks into dual-scale blocks: a CTA takes one copy of one head's K or V, since a block is
// quantised whole.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/cuda_error.hpp"
#include "ops/append/dual_scale/encode_dual.cuh"
#include "ops/copy_blocks/copy_dual.cuh"
#include "ops/gather/decode_row_apart.cuh"

namespace kvx::ops::cuda {
namespace {

// Rows, their scales and the channels' part, as they are.
__device__ void copy_dual_as_stored(const CopySide& side, const BlockCopy& copy, int head) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int token = warp; token < copy.num_tokens; token += kDualWarps) {
    copy_as_stored(side, copy_row_at(side, copy, token, head), lane);
  }
  const uint8_t* from = side.from.channels(copy.from_block, head);
  uint8_t* to = side.to.channels(copy.to_block, head);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * side.to.view.head_dim; i += kDualThreads) {
    to[i] = from[i];
  }
}

// blockIdx: copy, head, K or V.
__global__ void __launch_bounds__(kDualThreads)
    copy_dual(const __grid_constant__ CopyParams params) {
  extern __shared__ float memory[];
  const CopySide& side = params.sides[blockIdx.z];
  const int head = static_cast<int>(blockIdx.y);
  const BlockCopy copy = copy_at(params, blockIdx.x);
  if (!is_inside(params, copy)) {
    if (head == 0 && threadIdx.x == 0 && blockIdx.z == 0) count_outside(params);
    return;
  }
  if (side.is_skipped || copy.num_tokens == 0) return;
  if (side.is_alike) return copy_dual_as_stored(side, copy, head);
  const int head_dim = side.to.view.head_dim;
  const DualShared shared(memory, params.block_size, head_dim);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int token = static_cast<int>(threadIdx.x) / kWarp; token < copy.num_tokens;
       token += kDualWarps) {
    const RowSource row = {side.from.codes(copy.from_block, token, head),
                           side.from.scales(copy.from_block, token, head),
                           side.from.tensor_scale(head), side.from.channels(copy.from_block, head)};
    decode_row_apart(side.from, row, shared.rows + token * head_dim, lane);
  }
  __syncthreads();
  const DualTarget to = {side.to.codes(copy.to_block, 0, head),  side.to.view.codes.token_stride,
                         side.to.scales(copy.to_block, 0, head), side.to.view.scales.token_stride,
                         side.to.channels(copy.to_block, head),  side.to.view.feedback_of(head)};
  visit_dual_format(side.to.id, [&]<class Format>() {
    DualBlock<Format>(to, shared, copy.num_tokens, head_dim).encode();
  });
}

}  // namespace

Status launch_dual(const CudaContext& context, const CopyParams& params) {
  int shared_bytes = 0;
  for (const CopySide& side : params.sides) {
    if (side.is_skipped || side.is_alike) continue;
    shared_bytes =
        std::max(shared_bytes, DualShared::bytes(params.block_size, side.to.view.head_dim));
  }
  KVX_RETURN_IF_ERROR(device::cuda_status(
      cudaFuncSetAttribute(copy_dual, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "cudaFuncSetAttribute"));
  const dim3 grid(static_cast<unsigned>(params.copies.count),
                  static_cast<unsigned>(params.num_heads), 2);
  copy_dual<<<grid, kDualThreads, shared_bytes, static_cast<cudaStream_t>(context.stream)>>>(
      params);
  return device::cuda_launch_status("copy_dual");
}

}  // namespace kvx::ops::cuda
