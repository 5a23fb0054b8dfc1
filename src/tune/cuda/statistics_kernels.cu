// count_channels: a warp has 32 channels, so that its loads are one line; a CTA's warps share a
// split's rows. add_moments: a CTA has 64 x 64 numbers of a head's matrix, a thread 4 x 4 of them.
#include "tune/cuda/statistics_kernels.hpp"

#include "device/cuda_error.hpp"
#include "ops/cuda/floats.cuh"
#include "tune/log_histogram.hpp"
#include "tune/statistics.hpp"

namespace kvx::tune::gpu {
namespace {

cudaStream_t stream_of(device::CudaStream stream) {
  return static_cast<cudaStream_t>(stream);
}

__device__ float number_at(const FloatRows& rows, int64_t token, int head, int channel) {
  const int64_t at = token * rows.token_stride + head * rows.head_stride;
  const int bytes = rows.dtype == DType::kF32 ? 4 : 2;
  return ops::cuda::load_float(rows.dtype, rows.data + at * bytes, channel);
}

__device__ void check_finite(const CountedRows& rows, float x, int64_t row, int head, int channel) {
  if (isfinite(x) || atomicCAS(&rows.bad->is_found, 0, 1) != 0) return;
  rows.bad->side = rows.side;
  rows.bad->layer = rows.layer;
  rows.bad->head = head;
  rows.bad->channel = channel;
  rows.bad->value = x;
  rows.bad->position = rows.first_position + row;
}

// ---- channels

constexpr int kLanes = 32;
constexpr int kWarps = 8;

// A channel of K as it was before RoPE: the same operations in the same order as
// Statistics::feed_unturned.
struct Unturned {
  int pair = -1;    // -1: the channel does not rotate
  int partner = 0;  // the pair's other channel
  bool is_second = false;
};

__device__ Unturned unturned_of(const Turns& turns, int channel) {
  if (channel >= 2 * turns.num_pairs) return {};
  if (turns.is_interleaved) return {channel / 2, channel ^ 1, channel % 2 == 1};
  const bool is_second = channel >= turns.num_pairs;
  const int pair = is_second ? channel - turns.num_pairs : channel;
  return {pair, is_second ? pair : pair + turns.num_pairs, is_second};
}

__device__ float unturn(const CountedRows& rows, const Turns& turns, const Unturned& of, float x,
                        int64_t row, int head) {
  if (of.pair < 0) return x;
  const double angle = turns.inv_freq[of.pair] * static_cast<double>(rows.first_position + row);
  const auto cosine = static_cast<float>(cos(angle) / turns.attention_scaling);
  const auto sine = static_cast<float>(sin(angle) / turns.attention_scaling);
  const float partner = number_at(rows.rows, row, head, of.partner);
  return of.is_second ? x * cosine - partner * sine : x * cosine + partner * sine;
}

// The warps' sums of a lane's channel, in the warps' order; whole in warp 0.
__device__ double sum_over_warps(double x, double (&shared)[kWarps][kLanes]) {
  __syncthreads();  // shared may still be read
  shared[threadIdx.y][threadIdx.x] = x;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp][threadIdx.x];
  return sum;
}

__global__ void __launch_bounds__(kLanes* kWarps)
    count_channels(CountedRows rows, ChannelSums to, Turns turns) {
  __shared__ double shared[kWarps][kLanes];
  const int64_t num_channels = int64_t{rows.num_heads} * rows.head_dim;
  const int64_t index = int64_t{blockIdx.x} * kLanes + threadIdx.x;
  const bool is_channel = index < num_channels;
  const int head = static_cast<int>(index / rows.head_dim);
  const int channel = static_cast<int>(index % rows.head_dim);
  const int split = static_cast<int>(blockIdx.y);
  const Unturned unturned = unturned_of(turns, channel);

  double sum = 0, square_sum = 0, unturned_sum = 0;
  float largest = 0;
  for (int64_t begin = int64_t{split} * kRunRows; begin < rows.num_rows && is_channel;
       begin += kNumSplits * kRunRows) {
    const int64_t end = min(begin + kRunRows, int64_t{rows.num_rows});
    for (int64_t row = begin + threadIdx.y; row < end; row += kWarps) {
      const float x = number_at(rows.rows, row, head, channel);
      check_finite(rows, x, row, head, channel);
      const float magnitude = fabsf(x);
      largest = fmaxf(largest, magnitude);
      square_sum += double{x} * x;
      atomicAdd(&to.counts[index * LogHistogram::kNumBuckets + LogHistogram::bucket_of(magnitude)],
                1u);
      if (rows.first_position + row < kSinkTokens) continue;
      sum += x;
      if (to.unturned_sums != nullptr) {
        unturned_sum += unturn(rows, turns, unturned, x, row, head);
      }
    }
  }
  sum = sum_over_warps(sum, shared);
  square_sum = sum_over_warps(square_sum, shared);
  if (to.unturned_sums != nullptr) unturned_sum = sum_over_warps(unturned_sum, shared);
  if (!is_channel) return;
  // Magnitudes are ordered as their bits are.
  atomicMax(reinterpret_cast<int*>(&to.largest[index]), __float_as_int(largest));
  if (threadIdx.y != 0) return;
  const int64_t at = split * num_channels + index;
  to.sums[at] += sum;
  to.square_sums[at] += square_sum;
  if (to.unturned_sums != nullptr) to.unturned_sums[at] += unturned_sum;
}

// ---- moments

constexpr int kTile = 64;
constexpr int kSide = 16;                 // threads of a tile's side
constexpr int kOfThread = kTile / kSide;  // numbers of a thread's side

// Rows of the heads that share a KV head, one head's after the other's.
struct HeadRows {
  int first_head;
  int64_t num_rows;  // of all of them
};

// [kRunRows, kTile] numbers of channels [first, first + kTile); zeros where there are none.
__device__ void load_tile(const CountedRows& rows, const HeadRows& heads, int64_t begin, int first,
                          float (&tile)[kRunRows][kTile]) {
  for (int i = static_cast<int>(threadIdx.x); i < kRunRows * kTile; i += kSide * kSide) {
    const int64_t index = begin + i / kTile;
    const int channel = first + i % kTile;
    float x = 0;
    if (index < heads.num_rows && channel < rows.head_dim) {
      const int head = heads.first_head + static_cast<int>(index / rows.num_rows);
      const int64_t row = index % rows.num_rows;
      x = number_at(rows.rows, row, head, channel);
      check_finite(rows, x, row, head, channel);
    }
    tile[i / kTile][i % kTile] = x;
  }
}

// The pair of tiles that a number of the lower triangle stands for: 0 is (0, 0), 1 (1, 0), 2 (1,
// 1).
__device__ int2 tiles_of(int number) {
  int row = 0;
  while ((row + 1) * (row + 2) / 2 <= number) ++row;
  return {row, number - row * (row + 1) / 2};
}

__global__ void __launch_bounds__(kSide* kSide)
    add_moments(CountedRows rows, int num_kv_heads, double* sums) {
  __shared__ float a[kRunRows][kTile];
  __shared__ float b[kRunRows][kTile];
  const int2 tiles = tiles_of(static_cast<int>(blockIdx.x));
  const int kv_head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.z);
  const int heads_of_kv = rows.num_heads / num_kv_heads;
  const HeadRows heads = {kv_head * heads_of_kv, int64_t{heads_of_kv} * rows.num_rows};
  const int thread_row = static_cast<int>(threadIdx.x) / kSide;
  const int thread_column = static_cast<int>(threadIdx.x) % kSide;

  double total[kOfThread][kOfThread] = {};
  for (int64_t begin = int64_t{split} * kRunRows; begin < heads.num_rows;
       begin += kNumSplits * kRunRows) {
    __syncthreads();  // the tiles may still be read
    load_tile(rows, heads, begin, tiles.x * kTile, a);
    load_tile(rows, heads, begin, tiles.y * kTile, b);
    __syncthreads();
    float run[kOfThread][kOfThread] = {};
    for (int r = 0; r < kRunRows; ++r) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
#pragma unroll
        for (int j = 0; j < kOfThread; ++j) {
          // Neighbours' columns lie in neighbouring banks.
          run[i][j] = __fmaf_rn(a[r][thread_row * kOfThread + i], b[r][j * kSide + thread_column],
                                run[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
#pragma unroll
      for (int j = 0; j < kOfThread; ++j) total[i][j] += run[i][j];
    }
  }

  const int64_t size = int64_t{rows.head_dim} * rows.head_dim;
  double* to = sums + (int64_t{split} * num_kv_heads + kv_head) * size;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int row = tiles.x * kTile + thread_row * kOfThread + i;
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      const int column = tiles.y * kTile + j * kSide + thread_column;
      if (row < rows.head_dim && column <= row) {
        to[int64_t{row} * rows.head_dim + column] += total[i][j];
      }
    }
  }
}

}  // namespace

Status launch_count_channels(device::CudaStream stream, const CountedRows& rows,
                             const ChannelSums& sums, const Turns& turns) {
  const int64_t num_channels = int64_t{rows.num_heads} * rows.head_dim;
  const dim3 grid(static_cast<unsigned>((num_channels + kLanes - 1) / kLanes), kNumSplits);
  count_channels<<<grid, dim3(kLanes, kWarps), 0, stream_of(stream)>>>(rows, sums, turns);
  return device::cuda_launch_status("count_channels");
}

Status launch_add_moments(device::CudaStream stream, const CountedRows& rows, int num_kv_heads,
                          double* sums) {
  const int num_tiles = (rows.head_dim + kTile - 1) / kTile;
  const dim3 grid(static_cast<unsigned>(num_tiles * (num_tiles + 1) / 2),
                  static_cast<unsigned>(num_kv_heads), kNumSplits);
  add_moments<<<grid, kSide * kSide, 0, stream_of(stream)>>>(rows, num_kv_heads, sums);
  return device::cuda_launch_status("add_moments");
}

}  // namespace kvx::tune::gpu
