// append to dual-scale blocks: a CTA takes a block of one head's K or V, whose tokens the call has
// all and in order. Tokens of a part of a block are counted and not stored.
#include "device/cuda_error.hpp"
#include "ops/append/dual_scale/append_dual.hpp"
#include "ops/append/dual_scale/encode_dual.cuh"
#include "ops/append/dual_scale/window_rounding.hpp"
#include "ops/cuda/floats.cuh"
#include "ops/cuda/transform_row.cuh"
#include "ops/cuda/visit_format.cuh"

namespace kvx::ops::cuda {
namespace {

struct AppendDualParams {
  AppendParams append;
  DType window;
};

// Whether block_size tokens from this one on are those of a block.
__device__ bool begins_block(const AppendParams& params, const AppendSide& part, int64_t token) {
  const int block_size = params.block_size;
  if (token < 0 || token + block_size > params.num_tokens) return false;
  const int64_t first = params.slot_mapping[token];
  if (first < 0 || first % block_size != 0) return false;
  for (int i = block_size - 1; i >= 0; --i) {
    const auto t = static_cast<uint32_t>(token + i);
    const int64_t slot = params.slot_mapping[t];
    if (slot != first + i || !append_target(params, part, t, slot, false).is_stored) return false;
  }
  return true;
}

__device__ void count_parts(const AppendParams& params, const AppendSide& part, int64_t token) {
  const int64_t slot = params.slot_mapping[token];
  if (slot < 0 || begins_block(params, part, token - slot % params.block_size)) return;
  atomicAdd(&params.counters->out_of_range, 1ull);
}

// Blocks are block_size tokens long, so at most one begins in each block_size tokens of the call.
// Returns its first token, or -1, to all threads.
__device__ int64_t find_block(const AppendParams& params, const AppendSide& part) {
  __shared__ int64_t found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  const int64_t token = int64_t{blockIdx.x} * params.block_size + threadIdx.x;
  const bool is_mine = threadIdx.x < params.block_size && token < params.num_tokens;
  if (is_mine && begins_block(params, part, token)) found = token;
  if (is_mine && blockIdx.y == 0) count_parts(params, part, token);
  __syncthreads();
  return found;
}

__device__ void load_row(const AppendDualParams& params, const AppendSide& part, uint32_t token,
                         int head, float* x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int head_dim = part.side.view.head_dim;
  const int64_t slot = params.append.slot_mapping[token];
  const AppendTarget target = append_target(params.append, part, token, slot, false);
  const uint8_t* input = part.input_row(token, params.append.first_head + head);
  for (int d = lane; d < head_dim; d += kWarp) x[d] = load_float(part.input.dtype, input, d);
  apply_transform_row(append_transform(params.append, part, head, target.position_block), x,
                      head_dim, lane);
  for (int d = lane; d < head_dim; d += kWarp) x[d] = rounded_to(params.window, x[d]);
}

// blockIdx: block_size tokens of the call, head, K or V.
__global__ void __launch_bounds__(kDualThreads)
    append_dual(const __grid_constant__ AppendDualParams params) {
  extern __shared__ float memory[];
  const AppendSide& part = params.append.sides[blockIdx.z];
  if (!part.is_stored()) return;
  const int64_t first = find_block(params.append, part);
  if (first < 0) return;
  const int head = static_cast<int>(blockIdx.y);
  const int block_size = params.append.block_size;
  const CudaSide& side = part.side;
  const int head_dim = side.view.head_dim;
  const DualShared shared(memory, block_size, head_dim);
  for (int t = static_cast<int>(threadIdx.x) / kWarp; t < block_size; t += kDualWarps) {
    load_row(params, part, static_cast<uint32_t>(first + t), head, shared.rows + t * head_dim);
  }
  __syncthreads();
  const int64_t block = params.append.slot_mapping[first] / block_size;
  const DualTarget to = {side.codes(block, 0, head),  side.view.codes.token_stride,
                         side.scales(block, 0, head), side.view.scales.token_stride,
                         side.channels(block, head),  side.view.feedback_of(head)};
  visit_dual_format(side.id, [&]<class Format>() {
    DualBlock<Format>(to, shared, block_size, head_dim).encode();
  });
}

}  // namespace

Status launch_append_dual(const CudaContext& context, const AppendParams& params, DType window) {
  int shared_bytes = 0;
  for (const AppendSide& part : params.sides) {
    if (!part.is_stored()) continue;
    shared_bytes =
        std::max(shared_bytes, DualShared::bytes(params.block_size, part.side.view.head_dim));
  }
  KVX_RETURN_IF_ERROR(device::cuda_status(
      cudaFuncSetAttribute(append_dual, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "cudaFuncSetAttribute"));
  const dim3 grid(ceil_div(params.num_tokens, static_cast<uint32_t>(params.block_size)),
                  static_cast<unsigned>(params.num_heads), 2);
  append_dual<<<grid, kDualThreads, shared_bytes, static_cast<cudaStream_t>(context.stream)>>>(
      {params, window});
  return device::cuda_launch_status("append_dual");
}

}  // namespace kvx::ops::cuda
