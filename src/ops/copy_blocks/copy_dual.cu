// copy_blocks into dual-scale blocks: a CTA takes whole copies of one head's K or V, one after the
// other, since a block is quantised whole.
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

// Calls take(copy) for every gridDim.x-th of the copies that there is something to do for, in step.
// The lists of a window's plan are mostly empty, so all CTAs look through them.
template <class Take>
__device__ void for_each_copy(const CopyParams& params, const Take& take) {
  __shared__ int listed[kDualThreads];  // those of this round
  __shared__ int num_of_warp[kDualWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp, warp = thread / kWarp;
  int64_t num_seen = 0;
  for (int64_t first = 0; first < params.copies.count; first += kDualThreads) {
    bool is_listed = false;
    if (first + thread < params.copies.count) {
      const BlockCopy copy = copy_at(params, first + thread);
      is_listed = copy.num_tokens != 0 || !is_inside(params, copy);
    }
    const unsigned votes = __ballot_sync(kWholeWarp, is_listed);
    if (lane == 0) num_of_warp[warp] = __popc(votes);
    __syncthreads();
    int rank = __popc(votes & ((1u << lane) - 1)), num_listed = 0;
    for (int w = 0; w < kDualWarps; ++w) {
      if (w < warp) rank += num_of_warp[w];
      num_listed += num_of_warp[w];
    }
    if (is_listed) listed[rank] = thread;
    __syncthreads();
    const auto behind = static_cast<int>(num_seen % gridDim.x);
    const int begin =
        (static_cast<int>(blockIdx.x + gridDim.x) - behind) % static_cast<int>(gridDim.x);
    for (int i = begin; i < num_listed; i += static_cast<int>(gridDim.x)) {
      take(copy_at(params, first + listed[i]));
      __syncthreads();
    }
    num_seen += num_listed;
    __syncthreads();
  }
}

// A head's part of one copy.
__device__ void copy_dual_block(const CopyParams& params, const CopySide& side,
                                const BlockCopy& copy, int head, float* memory) {
  if (!is_inside(params, copy)) {
    if (head == 0 && threadIdx.x == 0 && blockIdx.z == 0) count_outside(params);
    return;
  }
  if (side.is_skipped) return;
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

// blockIdx: a share of the copies, head, K or V.
__global__ void __launch_bounds__(kDualThreads)
    copy_dual(const __grid_constant__ CopyParams params) {
  extern __shared__ float memory[];
  for_each_copy(params, [&](const BlockCopy& copy) {
    copy_dual_block(params, params.sides[blockIdx.z], copy, static_cast<int>(blockIdx.y), memory);
  });
}

// As many CTAs as run at once, so that looking through a list costs one wave.
unsigned num_shares(const CudaContext& context, const CopyParams& params) {
  constexpr int64_t kCtasPerMultiprocessor = 4;
  const int64_t at_once = context.device.num_multiprocessors * kCtasPerMultiprocessor;
  const int64_t shares = ceil_div<int64_t>(at_once, 2 * params.num_heads);
  return static_cast<unsigned>(std::min(params.copies.count, shares));
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
  const dim3 grid(num_shares(context, params), static_cast<unsigned>(params.num_heads), 2);
  copy_dual<<<grid, kDualThreads, shared_bytes, static_cast<cudaStream_t>(context.stream)>>>(
      params);
  return device::cuda_launch_status("copy_dual");
}

}  // namespace kvx::ops::cuda
