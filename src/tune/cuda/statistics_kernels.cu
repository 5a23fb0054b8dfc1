// make_turns: cosines and sines of positions, which all heads share. count_channels: a warp has 32
// channels, so that its loads are one line; a CTA's warps share a split's rows. add_moments: a CTA
// has 64 x 64 numbers of a head's matrix, a thread 8 x 4 of them, so that it multiplies more than
// it loads.
#include "tune/cuda/statistics_kernels.hpp"

#include <algorithm>

#include "device/cuda_error.hpp"
#include "ops/cuda/floats.cuh"
#include "tune/log_histogram.hpp"
#include "tune/statistics.hpp"

namespace kvx::tune::gpu {
namespace {

cudaStream_t stream_of(device::CudaStream stream) {
  return static_cast<cudaStream_t>(stream);
}

// Bytes from one token's number to the next one's.
template <DType Type>
__device__ int64_t token_bytes(const FloatRows& rows) {
  return rows.token_stride * (Type == DType::kF32 ? 4 : 2);
}

template <DType Type>
__device__ const uint8_t* address_of(const FloatRows& rows, int64_t token, int head, int channel) {
  const int64_t at = token * rows.token_stride + head * rows.head_stride + channel;
  return rows.data + at * (Type == DType::kF32 ? 4 : 2);
}

// Bits that are ordered as magnitudes are: from 0x7F800000 on no number is finite.
__device__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7FFFFFFFu;
}
constexpr uint32_t kInfinityBits = 0x7F800000u;

__device__ void report_nonfinite(const CountedRows& rows, float x, int64_t row, int head,
                                 int channel) {
  if (magnitude_bits(x) < kInfinityBits || atomicCAS(&rows.bad->is_found, 0, 1) != 0) return;
  rows.bad->side = rows.side;
  rows.bad->layer = rows.layer;
  rows.bad->head = head;
  rows.bad->channel = channel;
  rows.bad->value = x;
  rows.bad->position = rows.first_position + row;
}

// ---- turns

// table: [num_rows, num_pairs], cosine and sine, divided by the scaling; in binary64 as
// Statistics::turns_of computes them.
__global__ void make_turns(Turns turns, int64_t first_position, int num_rows, float2* table) {
  const int64_t count = int64_t{num_rows} * turns.num_pairs;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / turns.num_pairs;
    const double angle =
        turns.inv_freq[i - row * turns.num_pairs] * static_cast<double>(first_position + row);
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    table[i] = {static_cast<float>(cosine / turns.attention_scaling),
                static_cast<float>(sine / turns.attention_scaling)};
  }
}

// ---- channels

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kRowsAtOnce = 4;  // of a warp, whose loads are on their way together

// A channel of K as it was before RoPE: the same operations in the same order as
// Statistics::feed_unturned.
struct Unturned {
  int pair = -1;    // -1: the channel does not rotate
  int partner = 0;  // the pair's other channel
  bool is_second = false;

  __device__ float of(float x, float x_of_partner, float2 turn) const {
    if (pair < 0) return x;
    return is_second ? x * turn.x - x_of_partner * turn.y : x * turn.x + x_of_partner * turn.y;
  }
};

__device__ Unturned unturned_of(const Turns& turns, int channel) {
  if (channel >= 2 * turns.num_pairs) return {};
  if (turns.is_interleaved) return {channel / 2, channel ^ 1, channel % 2 == 1};
  const bool is_second = channel >= turns.num_pairs;
  const int pair = is_second ? channel - turns.num_pairs : channel;
  return {pair, is_second ? pair : pair + turns.num_pairs, is_second};
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

template <DType Type>
__global__ void __launch_bounds__(kLanes* kWarps)
    count_channels(CountedRows rows, ChannelSums to, Turns turns) {
  __shared__ double shared[kWarps][kLanes];
  const int64_t num_channels = int64_t{rows.num_heads} * rows.head_dim;
  const int64_t index = int64_t{blockIdx.x} * kLanes + threadIdx.x;
  const bool is_channel = index < num_channels;
  const int head = static_cast<int>(index / rows.head_dim);
  const int channel = static_cast<int>(index % rows.head_dim);
  const int split = static_cast<int>(blockIdx.y);
  const bool unturns = to.unturned_sums != nullptr;
  const Unturned unturned = unturned_of(turns, channel);
  const bool is_turned = unturns && unturned.pair >= 0;
  const auto* table = reinterpret_cast<const float2*>(turns.table);
  uint32_t* const counts = to.counts + index * LogHistogram::kNumBuckets;

  const int64_t bytes_of_warps = kWarps * token_bytes<Type>(rows.rows);
  const int64_t to_partner = (unturned.partner - channel) * (Type == DType::kF32 ? 4 : 2);

  double sum = 0, square_sum = 0, unturned_sum = 0;
  uint32_t largest = 0;  // magnitude_bits()
  for (int64_t begin = int64_t{split} * kRunRows; begin < rows.num_rows && is_channel;
       begin += kNumSplits * kRunRows) {
    const int64_t first = begin + threadIdx.y;
    const auto left = static_cast<int>(min(int64_t{kRunRows}, rows.num_rows - begin));
    const uint8_t* from = address_of<Type>(rows.rows, first, head, channel);
    const float2* turn_of = is_turned ? table + first * turns.num_pairs + unturned.pair : nullptr;
    for (int r = static_cast<int>(threadIdx.y); r < left; r += kWarps * kRowsAtOnce) {
      float x[kRowsAtOnce] = {}, x_of_partner[kRowsAtOnce] = {};
      float2 turn[kRowsAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i, from += bytes_of_warps) {
        if (r + i * kWarps >= left) continue;
        x[i] = ops::cuda::load_float(Type, from, 0);
        if (!is_turned) continue;
        x_of_partner[i] = ops::cuda::load_float(Type, from + to_partner, 0);
        turn[i] = turn_of[(r - static_cast<int>(threadIdx.y) + i * kWarps) * turns.num_pairs];
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (r + i * kWarps >= left) continue;
        const int64_t row = begin + r + i * kWarps;
        largest = max(largest, magnitude_bits(x[i]));
        if (magnitude_bits(x[i]) >= kInfinityBits) {
          report_nonfinite(rows, x[i], row, head, channel);
        }
        square_sum += double{x[i]} * x[i];
        atomicAdd(&counts[LogHistogram::bucket_of(fabsf(x[i]))], 1u);
        if (rows.first_position + row < kSinkTokens) continue;
        sum += x[i];
        if (unturns) unturned_sum += unturned.of(x[i], x_of_partner[i], turn[i]);
      }
    }
  }
  sum = sum_over_warps(sum, shared);
  square_sum = sum_over_warps(square_sum, shared);
  if (unturns) unturned_sum = sum_over_warps(unturned_sum, shared);
  if (!is_channel) return;
  atomicMax(reinterpret_cast<uint32_t*>(&to.largest[index]), largest);
  if (threadIdx.y != 0) return;
  const int64_t at = split * num_channels + index;
  to.sums[at] += sum;
  to.square_sums[at] += square_sum;
  if (unturns) to.unturned_sums[at] += unturned_sum;
}

// ---- moments

constexpr int kTile = 64;
constexpr int kTileThreads = 128;
constexpr int kThreadRows = 8;  // numbers of a thread
constexpr int kThreadColumns = 4;
constexpr int kColumnThreads = kTile / kThreadColumns;
static_assert(kTile / kThreadRows * kColumnThreads == kTileThreads);
constexpr int kLoadsAtOnce = 8;

// Rows [first, first + count) of one head.
struct HeadRun {
  int head;
  int64_t first;
  int count;
};

// [kRunRows, kTile] numbers of channels [first, first + kTile); zeros where there are none.
template <DType Type>
__device__ void load_tile(const CountedRows& rows, const HeadRun& run, int first,
                          float (&tile)[kRunRows][kTile]) {
  constexpr int kRowStep = kTileThreads / kTile;
  const int column = static_cast<int>(threadIdx.x) % kTile;
  const int channel = first + column;
  const int count = channel < rows.head_dim ? run.count : 0;
  int r = static_cast<int>(threadIdx.x) / kTile;
  const int64_t bytes_of_step = kRowStep * token_bytes<Type>(rows.rows);
  const uint8_t* from = address_of<Type>(rows.rows, run.first + r, run.head, channel);
#pragma unroll 1
  for (; r < kRunRows; r += kRowStep * kLoadsAtOnce) {
    float x[kLoadsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i, from += bytes_of_step) {
      if (r + i * kRowStep < count) x[i] = ops::cuda::load_float(Type, from, 0);
    }
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      largest = max(largest, magnitude_bits(x[i]));
      tile[r + i * kRowStep][column] = x[i];
    }
    if (largest < kInfinityBits) continue;
#pragma unroll 1
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      const int at = r + i * kRowStep;
      report_nonfinite(rows, tile[at][column], run.first + at, run.head, channel);
    }
  }
}

// The pair of tiles that a number of the lower triangle stands for: 0 is (0, 0), 1 (1, 0), 2 (1,
// 1).
__device__ int2 tiles_of(int number) {
  int row = 0;
  while ((row + 1) * (row + 2) / 2 <= number) ++row;
  return {row, number - row * (row + 1) / 2};
}

template <int Count>
__device__ __forceinline__ void load_four_by_four(const float* from, float (&to)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}

template <DType Type>
__global__ void __launch_bounds__(kTileThreads)
    add_moments(CountedRows rows, int num_kv_heads, double* sums) {
  __shared__ __align__(16) float a[kRunRows][kTile];
  __shared__ __align__(16) float b[kRunRows][kTile];
  const int2 tiles = tiles_of(static_cast<int>(blockIdx.x));
  const bool is_diagonal = tiles.x == tiles.y;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.z);
  const int heads_of_kv = rows.num_heads / num_kv_heads;
  const int runs_of_head = (rows.num_rows + kRunRows - 1) / kRunRows;
  const int first_row = static_cast<int>(threadIdx.x) / kColumnThreads * kThreadRows;
  const int first_column = static_cast<int>(threadIdx.x) % kColumnThreads * kThreadColumns;

  double total[kThreadRows][kThreadColumns] = {};
  for (int64_t i = split; i < int64_t{heads_of_kv} * runs_of_head; i += kNumSplits) {
    const int head = static_cast<int>(i / runs_of_head);
    const int64_t first = (i - int64_t{head} * runs_of_head) * kRunRows;
    const HeadRun run = {kv_head * heads_of_kv + head, first,
                         static_cast<int>(min(int64_t{kRunRows}, rows.num_rows - first))};
    __syncthreads();  // the tiles may still be read
    load_tile<Type>(rows, run, tiles.x * kTile, a);
    if (!is_diagonal) load_tile<Type>(rows, run, tiles.y * kTile, b);
    __syncthreads();
    const float(&other)[kRunRows][kTile] = is_diagonal ? a : b;
    float products[kThreadRows][kThreadColumns] = {};
#pragma unroll 4
    for (int r = 0; r < kRunRows; ++r) {
      float of_row[kThreadRows], of_column[kThreadColumns];
      load_four_by_four(a[r] + first_row, of_row);
      load_four_by_four(other[r] + first_column, of_column);
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
#pragma unroll
        for (int n = 0; n < kThreadColumns; ++n) {
          products[m][n] = __fmaf_rn(of_row[m], of_column[n], products[m][n]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
#pragma unroll
      for (int n = 0; n < kThreadColumns; ++n) total[m][n] += products[m][n];
    }
  }

  const int64_t size = int64_t{rows.head_dim} * rows.head_dim;
  double* to = sums + (int64_t{split} * num_kv_heads + kv_head) * size;
#pragma unroll
  for (int m = 0; m < kThreadRows; ++m) {
    const int row = tiles.x * kTile + first_row + m;
#pragma unroll
    for (int n = 0; n < kThreadColumns; ++n) {
      const int column = tiles.y * kTile + first_column + n;
      if (row < rows.head_dim && column <= row) {
        to[int64_t{row} * rows.head_dim + column] += total[m][n];
      }
    }
  }
}

// The kernel of the rows' type.
template <class Kernel>
Kernel of_type(DType type, Kernel f32, Kernel f16, Kernel bf16) {
  return type == DType::kF32 ? f32 : type == DType::kF16 ? f16 : bf16;
}

}  // namespace

Status launch_make_turns(device::CudaStream stream, const Turns& turns, int64_t first_position,
                         int num_rows, float* table) {
  constexpr int kThreads = 128;
  constexpr int64_t kMostCtas = 1024;
  const int64_t count = int64_t{num_rows} * turns.num_pairs;
  const auto num_ctas =
      static_cast<unsigned>(std::min(kMostCtas, (count + kThreads - 1) / kThreads));
  make_turns<<<num_ctas, kThreads, 0, stream_of(stream)>>>(turns, first_position, num_rows,
                                                           reinterpret_cast<float2*>(table));
  return device::cuda_launch_status("make_turns");
}

Status launch_count_channels(device::CudaStream stream, const CountedRows& rows,
                             const ChannelSums& sums, const Turns& turns) {
  const int64_t num_channels = int64_t{rows.num_heads} * rows.head_dim;
  const dim3 grid(static_cast<unsigned>((num_channels + kLanes - 1) / kLanes), kNumSplits);
  const auto kernel = of_type(rows.rows.dtype, count_channels<DType::kF32>,
                              count_channels<DType::kF16>, count_channels<DType::kBF16>);
  kernel<<<grid, dim3(kLanes, kWarps), 0, stream_of(stream)>>>(rows, sums, turns);
  return device::cuda_launch_status("count_channels");
}

Status launch_add_moments(device::CudaStream stream, const CountedRows& rows, int num_kv_heads,
                          double* sums) {
  const int num_tiles = (rows.head_dim + kTile - 1) / kTile;
  const dim3 grid(static_cast<unsigned>(num_tiles * (num_tiles + 1) / 2),
                  static_cast<unsigned>(num_kv_heads), kNumSplits);
  const auto kernel = of_type(rows.rows.dtype, add_moments<DType::kF32>, add_moments<DType::kF16>,
                              add_moments<DType::kBF16>);
  kernel<<<grid, kTileThreads, 0, stream_of(stream)>>>(rows, num_kv_heads, sums);
  return device::cuda_launch_status("add_moments");
}

}  // namespace kvx::tune::gpu
