// merge_splits: the work tiles of a row become its output. A row's warps share its work tiles out
// among themselves: all eight of a CTA, or fewer where there are many rows.
#include "core/checked.hpp"
#include "ops/attend/cuda/common/balance.cuh"
#include "ops/attend/cuda/common/finish_row.cuh"
#include "ops/attend/cuda/common/launch.hpp"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kAtOnce = 4;  // splits whose sums a warp reads before it uses the first

__device__ float weight_of(const Softmax2& part, float max) {
  return part.sum == 0 ? 0.0f : exp2f(part.max - max);
}

// A row's partial results: number i is at first + i * stride.
struct RowParts {
  int64_t first;
  int64_t stride;
  int num;  // 0: there is nothing to merge
};

// The last sequence that begins at this token or before: one without tokens begins with the next.
// By a warp: 32 places at a time.
__device__ int sequence_of_token(const MergeParams& params, int64_t token, int lane) {
  int first = 0, num = params.num_sequences;
  while (num > 1) {
    const int step = (num + kWarp - 1) / kWarp;
    const int at = lane * step;
    const bool is_before = at < num && params.q_starts[first + at] <= token;
    const uint32_t before = __ballot_sync(kWholeWarp, is_before);
    const int last = before == 0 ? 0 : (31 - __clz(static_cast<int>(before))) * step;
    first += last;
    num = min(step, num - last);
  }
  return first;
}

__device__ RowParts parts_of_row(const MergeParams& params, int64_t token, int q_head, int lane) {
  if (params.balance.most_work_tiles == 0) {
    return {partial_index(params, token, q_head, 0), 1, params.num_splits};
  }
  const int sequence = sequence_of_token(params, token, lane);
  const SequenceShape shape = sequence_shape(params, sequence);
  const int64_t new_token = token - shape.q_start;
  if (!shape.is_valid || new_token < 0 || new_token >= shape.q_len) return {0, 0, 0};
  const SequenceWorkTiles work_tiles = params.balance.of_sequences[sequence];
  if (work_tiles.num == 1) return {0, 0, 0};  // it stored its rows itself
  const int row = static_cast<int>(new_token) * params.q_per_kv + q_head % params.q_per_kv;
  const int head = q_head / params.q_per_kv - params.first_head;
  const int row_tile = row / params.balance.rows_of_work_tile;
  const int64_t first =
      balanced_partial(params.balance, params.num_heads, work_tiles.first, head, row_tile);
  return {first + row % params.balance.rows_of_work_tile,
          balanced_partial(params.balance, params.num_heads, 1, 0, 0), work_tiles.num};
}

// The softmax of all splits together, in every lane. An empty split has sum 0; a NaN stays.
__device__ Softmax2 merge_softmax(const MergeParams& params, const RowParts& row, int lane) {
  const auto part_of = [&](int s) { return params.partial_softmax[row.first + s * row.stride]; };
  float max = -INFINITY;
  for (int s = lane; s < row.num; s += kWarp) {
    const Softmax2 part = part_of(s);
    if (part.sum != 0) max = fmaxf(max, part.max);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kWholeWarp, max, offset));
  }
  float sum = 0;
  for (int s = lane; s < row.num; s += kWarp) {
    const Softmax2 part = part_of(s);
    sum += part.sum * weight_of(part, max);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, offset);
  }
  return {max, sum};
}

// A lane reads one number of a row, or four where rows lie on 16 bytes.
template <class T>
__device__ T load_numbers(const float* row, int d);
template <>
__device__ float load_numbers<float>(const float* row, int d) {
  return row[d];
}
template <>
__device__ float4 load_numbers<float4>(const float* row, int d) {
  return *reinterpret_cast<const float4*>(row + d);
}
__device__ void add_weighted(float weight, float x, float& sum) {
  sum += weight * x;
}
__device__ void add_weighted(float weight, const float4& x, float4& sum) {
  sum.x += weight * x.x;
  sum.y += weight * x.y;
  sum.z += weight * x.z;
  sum.w += weight * x.w;
}

// Sums of the splits that are this warp's, of num_warps, into out [dim] of its own.
template <class T>
__device__ void add_splits(const MergeParams& params, const RowParts& row, float max, int warp,
                           int num_warps, int lane, float* out) {
  constexpr int kNumbers = sizeof(T) / sizeof(float);
  const int dim = params.value_dim;
  for (int d = lane * kNumbers; d < dim; d += kWarp * kNumbers) {
    T sum = {};
    for (int s = warp; s < row.num; s += num_warps * kAtOnce) {
      T numbers[kAtOnce];
      float weights[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int split = s + i * num_warps;
        const bool is_split = split < row.num;
        const int64_t at = row.first + split * row.stride;
        weights[i] = is_split ? weight_of(params.partial_softmax[at], max) : 0.0f;
        numbers[i] = is_split ? load_numbers<T>(params.partial_out + at * dim, d) : T{};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // An empty split's numbers are not written.
        if (weights[i] != 0) add_weighted(weights[i], numbers[i], sum);
      }
    }
    *reinterpret_cast<T*>(out + d) = sum;
  }
}

__global__ void __launch_bounds__(kThreads) merge_rows(const __grid_constant__ MergeParams params) {
  wait_for_earlier_launches();
  extern __shared__ __align__(16) float shared[];  // [kWarps, dim]
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int num_warps = params.warps_of_row;
  const int of_row = warp % num_warps;
  const int dim = params.value_dim;
  const int run_heads = params.num_heads * params.q_per_kv;
  const int64_t index = int64_t{blockIdx.x} * (kWarps / num_warps) + warp / num_warps;
  const int64_t token = index / run_heads;
  const int q_head = params.first_head * params.q_per_kv + static_cast<int>(index % run_heads);
  // Rows outside are padding, or those of sequences that another launch computes. They are merged
  // like others and not stored, since a branch here would wait for these two numbers.
  const int first_token = params.q_starts[0];
  const int end_token = params.q_starts[params.num_sequences];

  RowParts row = {};
  if (token < params.total_q) row = parts_of_row(params, token, q_head, lane);
  Softmax2 tokens = {};
  float* sums = shared + warp * dim;
  if (row.num > 0) {
    tokens = merge_softmax(params, row, lane);
    if (dim % 4 == 0) {
      add_splits<float4>(params, row, tokens.max, of_row, num_warps, lane, sums);
    } else {
      add_splits<float>(params, row, tokens.max, of_row, num_warps, lane, sums);
    }
  }
  __syncthreads();
  if (of_row != 0 || row.num == 0 || token < first_token || token >= end_token) return;
  for (int d = lane; d < dim; d += kWarp) {
    float sum = 0;
    for (int w = 0; w < num_warps; ++w) sum += sums[w * dim + d];
    sums[d] = sum;
  }
  finish_row(params, token, q_head, tokens, sums, lane);
}

}  // namespace

cudaError_t launch_merge_splits(const CudaContext& context, MergeParams& params) {
  constexpr int kCtas = 4;  // a multiprocessor
  const int64_t num_rows = params.total_q * params.num_heads * params.q_per_kv;
  params.warps_of_row = kWarps;
  while (params.warps_of_row > 1 && ceil_div<int64_t>(num_rows * params.warps_of_row, kWarps) >
                                        kCtas * context.device.num_multiprocessors) {
    params.warps_of_row /= 2;
  }
  const auto num_ctas =
      static_cast<unsigned>(ceil_div<int64_t>(num_rows * params.warps_of_row, kWarps));
  const int shared_bytes = kWarps * params.value_dim * static_cast<int>(sizeof(float));
  return launch_overlapping(context, reinterpret_cast<const void*>(&merge_rows),
                            {dim3(num_ctas), kThreads, shared_bytes}, &params);
}

}  // namespace kvx::ops::cuda
