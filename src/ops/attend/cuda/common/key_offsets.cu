// score_offsets: a warp takes four query rows of a KV head, which share the loads of an offset.
#include "ops/attend/cuda/common/launch.hpp"
#include "ops/attend/cuda/common/params.cuh"
#include "ops/cuda/floats.cuh"

namespace kvx::ops::cuda {
namespace {

constexpr int kRowsOfWarp = 4;
constexpr int kWarps = 8;
constexpr int kBlocksOfCta = 32;
constexpr int kBlocksAtOnce = 8;  // whose sums are stored together

// The sum over the warp of number `row` of four, in the lanes whose row_of_lane() is `row`.
__device__ float sum_of_row(const float (&x)[kRowsOfWarp], int lane) {
  const bool is_high = (lane & 16) != 0;
  float a = is_high ? x[2] : x[0], b = is_high ? x[3] : x[1];
  a += __shfl_xor_sync(kWholeWarp, is_high ? x[0] : x[2], 16);
  b += __shfl_xor_sync(kWholeWarp, is_high ? x[1] : x[3], 16);
  const bool is_odd = (lane & 8) != 0;
  float sum = is_odd ? b : a;
  sum += __shfl_xor_sync(kWholeWarp, is_odd ? a : b, 8);
  for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, offset);
  return sum;
}
__device__ int row_of_lane(int lane) {
  return (lane >> 4 & 1) * 2 + (lane >> 3 & 1);
}

// Sequences that are longer than the offsets reach are counted once a call.
__device__ void count_unknown(const KeyOffsetParams& params) {
  if (blockIdx.x != 0 || blockIdx.y != 0 || blockIdx.z != 0 || params.first_head != 0) return;
  for (int s = threadIdx.x; s < params.num_sequences; s += kWarps * kWarp) {
    const int64_t known = params.num_offset_blocks * params.block_size;
    const bool has_queries = params.q_starts[s + 1] > params.q_starts[s];
    if (has_queries && params.seq_lens[s] > known) atomicAdd(&params.counters->out_of_range, 1ull);
  }
}

// Chunks: of 32 numbers, that a row has at most.
template <int Chunks>
__global__ void __launch_bounds__(kWarps* kWarp)
    score_offsets(const __grid_constant__ KeyOffsetParams params) {
  count_unknown(params);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int kv_head = params.first_head + static_cast<int>(blockIdx.y);
  const int64_t first_q = params.q_starts[0];
  const int64_t end_q = min(int64_t{params.q_starts[params.num_sequences]}, params.total_q);
  // Rows of the KV head are numbered query after query.
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * kRowsOfWarp;
  const int q_per_kv = params.num_q_heads / params.num_kv_heads;
  const int64_t num_rows = (end_q - first_q) * q_per_kv;
  if (first_q < 0 || first >= num_rows) return;
  const auto row_number = [&](int64_t row) {
    const int64_t q = first_q + row / q_per_kv;
    return q * params.num_q_heads + kv_head * q_per_kv + row % q_per_kv;
  };

  float queries[kRowsOfWarp][Chunks];
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int64_t row = min(first + r, num_rows - 1);
    const int64_t q_row = first_q + row / q_per_kv;
    const int64_t head = kv_head * q_per_kv + row % q_per_kv;
    const uint8_t* const at =
        params.q.data +
        (q_row * params.q.token_stride + head * params.q.head_stride) * bytes_of(params.q.dtype);
#pragma unroll
    for (int c = 0; c < Chunks; ++c) {
      const int d = lane + c * kWarp;
      queries[r][c] = d < params.dim ? load_float(params.q.dtype, at, d) : 0.0f;
    }
  }

  const int64_t own_row = first + row_of_lane(lane);
  float* const scores =
      params.table.scores + row_number(min(own_row, num_rows - 1)) * params.table.num_blocks;
  const float score_scale = params.softmax_scale * (params.has_cap ? 1.0f : kLog2E);
  const int begin = static_cast<int>(blockIdx.z) * kBlocksOfCta;
  const int end = min(begin + kBlocksOfCta, params.table.num_blocks);
  for (int at_once = begin; at_once < end; at_once += kBlocksAtOnce) {
    float kept = 0;
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; ++i) {
      const int64_t block = min(int64_t{at_once} + i, params.num_offset_blocks - 1);
      const float* const offset =
          params.offsets + (block * params.num_kv_heads + kv_head) * params.dim;
      float sums[kRowsOfWarp] = {};
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        const int d = lane + c * kWarp;
        const float x = d < params.dim ? offset[d] : 0.0f;
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) sums[r] = fmaf(queries[r][c], x, sums[r]);
      }
      const float sum = sum_of_row(sums, lane);
      if (lane % kBlocksAtOnce == i) kept = sum;
    }
    const int block = at_once + lane % kBlocksAtOnce;
    if (own_row >= num_rows || block >= end) continue;
    scores[block] = block < params.num_offset_blocks ? kept * score_scale : -INFINITY;
  }
}

}  // namespace

cudaError_t launch_score_offsets(const KeyOffsetParams& params, cudaStream_t stream) {
  constexpr int64_t kRows = kWarps * kRowsOfWarp;
  const int64_t num_rows = params.total_q * (params.num_q_heads / params.num_kv_heads);
  const dim3 grid(
      static_cast<unsigned>((num_rows + kRows - 1) / kRows),
      static_cast<unsigned>(params.num_heads),
      static_cast<unsigned>((params.table.num_blocks + kBlocksOfCta - 1) / kBlocksOfCta));
  if (params.dim <= 4 * kWarp) {
    score_offsets<4><<<grid, kWarps * kWarp, 0, stream>>>(params);
  } else {
    static_assert(kMostOffsetDim == 8 * kWarp);
    score_offsets<8><<<grid, kWarps * kWarp, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace kvx::ops::cuda
