// merge_splits: the pieces of a row become its output. A CTA a row: its warps share the splits out
// among themselves.
#include "ops/attend/cuda/balance.cuh"
#include "ops/attend/cuda/finish_row.cuh"
#include "ops/attend/cuda/launch.hpp"
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
__device__ int sequence_of_token(const AttendJob& job, int64_t token) {
  int low = 0, high = job.args.num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (job.args.q_starts[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ RowParts parts_of_row(const AttendJob& job, int64_t token, int q_head) {
  if (job.balanced_pieces == 0) {
    return {partial_index(job, token, q_head, 0), 1, job.num_splits};
  }
  const int sequence = sequence_of_token(job, token);
  const SequenceShape shape = sequence_shape(job, sequence);
  const int64_t new_token = token - shape.q_start;
  if (!shape.is_valid || new_token < 0 || new_token >= shape.q_len) return {0, 0, 0};
  const SequencePieces pieces = job.sequence_pieces[sequence];
  if (pieces.num == 1) return {0, 0, 0};  // it stored its rows itself
  const int row = static_cast<int>(new_token) * job.q_per_kv + q_head % job.q_per_kv;
  const int head = q_head / job.q_per_kv - job.packed.first_head;
  const int row_tile = row / job.rows_of_piece;
  const int64_t first = balanced_partial(job, pieces.first, head, row_tile);
  return {first + row % job.rows_of_piece, balanced_partial(job, 1, 0, 0), pieces.num};
}

// The softmax of all splits together, in every lane. An empty split has sum 0; a NaN stays.
__device__ Softmax2 merge_softmax(const AttendJob& job, const RowParts& row, int lane) {
  const auto part_of = [&](int s) { return job.partial_softmax[row.first + s * row.stride]; };
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

// Sums of the splits that are this warp's, into out [dim] of its own.
template <class T>
__device__ void add_splits(const AttendJob& job, const RowParts& row, float max, int warp, int lane,
                           float* out) {
  constexpr int kNumbers = sizeof(T) / sizeof(float);
  const int dim = job.packed.v.view.head_dim;
  for (int d = lane * kNumbers; d < dim; d += kWarp * kNumbers) {
    T sum = {};
    for (int s = warp; s < row.num; s += kWarps * kAtOnce) {
      T numbers[kAtOnce];
      float weights[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int split = s + i * kWarps;
        const bool is_split = split < row.num;
        const int64_t at = row.first + split * row.stride;
        weights[i] = is_split ? weight_of(job.partial_softmax[at], max) : 0.0f;
        numbers[i] = is_split ? load_numbers<T>(job.partial_out + at * dim, d) : T{};
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

__global__ void __launch_bounds__(kThreads) merge_rows(const __grid_constant__ AttendJob job) {
  wait_for_earlier_launches();
  extern __shared__ __align__(16) float shared[];  // [kWarps, dim]
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int dim = job.packed.v.view.head_dim;
  const int64_t run_heads = int64_t{job.packed.num_heads} * job.q_per_kv;
  const int64_t token = blockIdx.x / run_heads;
  const int q_head =
      static_cast<int>(job.packed.first_head * job.q_per_kv + blockIdx.x % run_heads);

  const RowParts row = parts_of_row(job, token, q_head);
  if (row.num == 0) return;
  const Softmax2 tokens = merge_softmax(job, row, lane);
  if (dim % 4 == 0) {
    add_splits<float4>(job, row, tokens.max, warp, lane, shared + warp * dim);
  } else {
    add_splits<float>(job, row, tokens.max, warp, lane, shared + warp * dim);
  }
  __syncthreads();
  if (warp != 0) return;
  for (int d = lane; d < dim; d += kWarp) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += shared[w * dim + d];
    shared[d] = sum;
  }
  finish_row(job, token, q_head, tokens, shared, lane);
}

}  // namespace

cudaError_t launch_merge_splits(const CudaContext& context, const AttendJob& job) {
  const int64_t num_rows = job.total_q * job.packed.num_heads * job.q_per_kv;
  const int shared_bytes = kWarps * job.packed.v.view.head_dim * static_cast<int>(sizeof(float));
  return launch_overlapping(context, reinterpret_cast<const void*>(&merge_rows),
                            {dim3(static_cast<unsigned>(num_rows)), kThreads, shared_bytes}, &job);
}

}  // namespace kvx::ops::cuda
