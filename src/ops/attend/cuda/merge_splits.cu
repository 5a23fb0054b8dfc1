// merge_splits: the pieces of a row become its output. A CTA a row: its warps share the splits out
// among themselves.
#include "ops/attend/cuda/finish_row.cuh"
#include "ops/attend/cuda/launch.hpp"

namespace kvx::ops::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kAtOnce = 4;  // splits whose sums a warp reads before it uses the first

__device__ float weight_of(const Softmax2& part, float max) {
  return part.sum == 0 ? 0.0f : exp2f(part.max - max);
}

// The softmax of all splits together, in every lane. An empty split has sum 0; a NaN stays.
__device__ Softmax2 merge_softmax(const Softmax2* parts, int num_splits, int lane) {
  float max = -INFINITY;
  for (int s = lane; s < num_splits; s += kWarp) {
    if (parts[s].sum != 0) max = fmaxf(max, parts[s].max);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kWholeWarp, max, offset));
  }
  float sum = 0;
  for (int s = lane; s < num_splits; s += kWarp) sum += parts[s].sum * weight_of(parts[s], max);
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
__device__ void add_splits(const AttendJob& job, int64_t first, float max, int warp, int lane,
                           float* out) {
  constexpr int kNumbers = sizeof(T) / sizeof(float);
  const int dim = job.packed.v.view.head_dim;
  const Softmax2* parts = job.partial_softmax + first;
  for (int d = lane * kNumbers; d < dim; d += kWarp * kNumbers) {
    T sum = {};
    for (int s = warp; s < job.num_splits; s += kWarps * kAtOnce) {
      T numbers[kAtOnce];
      float weights[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int split = s + i * kWarps;
        const bool is_split = split < job.num_splits;
        weights[i] = is_split ? weight_of(parts[split], max) : 0.0f;
        numbers[i] = is_split ? load_numbers<T>(job.partial_out + (first + split) * dim, d) : T{};
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
  extern __shared__ __align__(16) float shared[];  // [kWarps, dim]
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int dim = job.packed.v.view.head_dim;
  const int64_t run_heads = int64_t{job.packed.num_heads} * job.q_per_kv;
  const int64_t row = blockIdx.x;
  const int64_t token = row / run_heads;
  const int q_head = static_cast<int>(job.packed.first_head * job.q_per_kv + row % run_heads);

  const int64_t first = partial_index(job, token, q_head, 0);
  const Softmax2* parts = job.partial_softmax + first;
  const Softmax2 tokens = merge_softmax(parts, job.num_splits, lane);
  if (dim % 4 == 0) {
    add_splits<float4>(job, first, tokens.max, warp, lane, shared + warp * dim);
  } else {
    add_splits<float>(job, first, tokens.max, warp, lane, shared + warp * dim);
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

cudaError_t launch_merge_splits(const AttendJob& job, cudaStream_t stream) {
  const int64_t num_rows = job.total_q * job.packed.num_heads * job.q_per_kv;
  const auto num_ctas = static_cast<unsigned>(num_rows);
  const int shared_bytes = kWarps * job.packed.v.view.head_dim * static_cast<int>(sizeof(float));
  merge_rows<<<num_ctas, kThreads, shared_bytes, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace kvx::ops::cuda
