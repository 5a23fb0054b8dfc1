// The queries of the latent kernel on mma.sync, in registers: a warp has the numbers of 16 rows
// that meet its slice of the keys.
#pragma once

#include "ops/attend/cuda/latent/mma_sync/shape.cuh"
#include "ops/cuda/floats.cuh"
#include "ops/cuda/transform_row.cuh"

namespace kvx::ops::cuda {

// How a walk's scores become numbers in units of log2: what multiplies the sum over a row's latent
// numbers, before the others' products are added where these have another unit; and all of it,
// times a row's own power of two.
struct LatentScoreFactors {
  float latent;
  float all;
};

// factor: a number of the tile's unit. Packed numbers beside a segment of 16 bits have another unit
// than those.
__device__ inline LatentScoreFactors score_factors(const LatentParams& params, float unit,
                                                   LatentRest rest) {
  if (rest == LatentRest::kPacked) return {1.0f, params.softmax_scale * unit};
  return {unit, params.softmax_scale};
}

// What a warp knows of the scores of the four rows that it weighs: (score * scale + bias), in units
// of log2 or, before a softcap, in their own.
struct LatentScoreRows {
  float scale[4];
  float bias[4];  // of K's mean
};

class LatentMmaQueries {
  using Shape = LatentMmaShape;

 public:
  static constexpr int kSteps = kLatentValueDim / 16 / Shape::kSlices;  // of 16 numbers
  static_assert(kLatentRestDim / 16 == Shape::kSlices, "a slice has one step of the rest");

  // A of mma.sync.
  uint32_t latent[kSteps][4];
  uint32_t rest[4];
  uint32_t low[4];  // what bf16 left of them

  // By all threads, before the buffers have tiles.
  template <class Reader>
  __device__ __forceinline__ void load(const LatentMmaWalk& walk, const Reader& reader,
                                       const LatentScoreFactors& factors, LatentScoreRows& rows) {
    using Mma = typename Reader::Mma;
    const LatentParams& params = walk.params;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const float to_log2 = params.softcap == 0 ? kLog2E : 1.0f;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = 4 * warp + r;
      rows.bias[r] = stage(walk, row, lane) * params.softmax_scale * to_log2;
      const float scale = Mma::kScalesQueries ? power_of_two(walk, row, lane) : 1.0f;
      rows.scale[r] = fabsf(factors.all) / scale * to_log2;
      if (lane == 0) store_shared_float(walk.memory.query_scale(row), scale);
    }
    __syncthreads();
    const float sign = factors.all < 0 ? -1.0f : factors.all == 0 ? 0.0f : 1.0f;
    const int g = lane / 4, t = lane % 4;
    const int slice = warp / Shape::kRowTiles, row_tile = warp % Shape::kRowTiles;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows g and g + 8
      const int row = 16 * row_tile + g + 8 * half;
      const float scale = load_shared_float(walk.memory.query_scale(row)) * sign;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int chunk = 2 * (slice * kSteps + step);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float2 x = pair(walk, row, chunk + c, reader.order(), t, scale);
          latent[step][half + 2 * c] = Mma::pack(x.x, x.y);
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int chunk = kLatentValueDim / 8 + 2 * slice + c;
        const float2 x = pair(walk, row, chunk, reader.order_of_rest(), t, scale);
        const int i = half + 2 * c;
        low[i] = 0;
        switch (reader.rest()) {
          case LatentRest::kPacked:
            rest[i] = Mma::pack(x.x, x.y);
            break;
          case LatentRest::kF16:
            rest[i] = MmaF16::pack(x.x, x.y);
            break;
          case LatentRest::kBf16: {
            rest[i] = MmaBf16::pack(x.x, x.y);
            const float2 high = MmaBf16::unpack(rest[i]);
            low[i] = MmaBf16::pack(x.x - high.x, x.y - high.y);
          }
        }
      }
    }
    __syncthreads();
  }

 private:
  // Brings a row to its stage as it meets K's transformed rows; one that is not there is zeros.
  // Returns q . mean of K, in every lane. By a warp.
  __device__ static float stage(const LatentMmaWalk& walk, int row, int lane) {
    const LatentParams& params = walk.params;
    const LatentWorkTile& tile = walk.work_tile;
    float* x = walk.memory.staged_query(row);
    if (row >= tile.num_rows) {
      for (int d = lane; d < kLatentKeyDim; d += kWarp) x[d] = 0;
      return 0.0f;
    }
    const FloatRows& q = params.q;
    const QueryRowAt at = query_row(params, tile.kv_head, tile.first_row + row);
    const int64_t number = (int64_t{tile.shape.q_start} + at.new_token) * q.token_stride +
                           int64_t{at.q_head} * q.head_stride;
    const uint8_t* from = q.data + number * bytes_of(q.dtype);
#pragma unroll 6
    for (int d = lane; d < kLatentKeyDim; d += kWarp) x[d] = load_float(q.dtype, from, d);
    if (!params.transforms_k) return 0.0f;
    const int dim = params.tile_k.head_dim;
    const TransformRow k =
        transform_row(params.transform_k, tile.kv_head, params.num_kv_heads, dim, 0);
    float bias = 0;
    for (int d = lane; d < dim; d += kWarp) {
      if (k.mean) bias += x[d] * k.mean[d];
      if (k.factor) x[d] /= k.factor[d];
    }
    if (k.hadamard) hadamard_row(x, dim, lane);
    for (int other = 1; other < kWarp; other *= 2) {
      bias += __shfl_xor_sync(kWholeWarp, bias, other);
    }
    return bias;
  }
  __device__ static float2 pair(const LatentMmaWalk& walk, int row, int chunk, PairOrder order,
                                int t, float scale) {
    const float* eight = walk.memory.staged_query(row) + 8 * chunk;
    return {eight[first_of_pair(order, t)] * scale, eight[second_of_pair(order, t)] * scale};
  }

  // That brings a staged row into f16's range. By the warp that staged it.
  __device__ static float power_of_two(const LatentMmaWalk& walk, int row, int lane) {
    if (walk.params.q.dtype == DType::kF16 && !walk.params.transforms_k) return 1.0f;
    const float* x = walk.memory.staged_query(row);
    float largest = 0;
    for (int d = lane; d < kLatentKeyDim; d += kWarp) largest = fmaxf(largest, fabsf(x[d]));
    for (int other = 1; other < kWarp; other *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, other));
    }
    return largest > 0 && largest < INFINITY ? exp2f(static_cast<float>(-ilogbf(largest))) : 1.0f;
  }
};

}  // namespace kvx::ops::cuda
