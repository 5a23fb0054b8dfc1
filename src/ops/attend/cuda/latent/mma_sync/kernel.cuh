// The latent kernel on mma.sync, for all devices: attention over rows that are both keys and
// values, 32 query rows of a KV head against a split of the tokens. Eight warps do everything, a
// tile of 32 tokens at a time:
//
//   keys     a warp multiplies a slice of the row's numbers, of 16 query rows; parts of scores
//   weights  a warp adds up the parts of four query rows, a lane a token, and weighs
//   values   a warp adds 64 columns of all query rows' weighted values
//
// Packed rows become f16 numbers in shared memory, once for keys and values. Tokens of the
// full-precision window follow the others, in bf16, with the same sums.
#pragma once

#include "ops/attend/cuda/common/finish_row.cuh"
#include "ops/attend/cuda/latent/mma_sync/load.cuh"
#include "ops/attend/cuda/latent/mma_sync/queries.cuh"

namespace kvx::ops::cuda {

class LatentMmaWorker {
  using Shape = LatentMmaShape;
  static constexpr int kRowsOfWarp = Shape::kRows / Shape::kWarps;  // that it weighs
  static constexpr int kTokenTiles = Shape::kTokens / 8;
  static_assert(Shape::kTokens == kWarp, "a lane weighs a token");

 public:
  __device__ explicit LatentMmaWorker(const LatentMmaWalk& walk)
      : walk_(walk),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {
    const LatentWorkTile& tile = walk.work_tile;
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      max_[r] = kLeastMaximum;
      sum_[r] = 0;
      const int row = min(row_of_warp(r), tile.num_rows - 1);
      new_token_[r] = (tile.first_row + row) / walk.params.q_per_kv;
      seen_[r] = seen_by(walk.params, tile.shape, new_token_[r]);
    }
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums_[m][j] = {};
    }
  }

  // Attends to tokens whose rows the reader reads. unit: a number is one of the tile times this.
  template <class Reader>
  __device__ __forceinline__ void attend(Reader& reader, TokenRange tokens, float unit) {
    if (tokens.begin >= tokens.end) return;
    const LatentScoreFactors factors = score_factors(walk_.params, unit, reader.rest());
    LatentScoreRows score_rows;
    LatentMmaQueries queries;
    queries.load(walk_, reader, factors, score_rows);
    reader.begin(tokens);
    reader.ask(0);
    reader.store(0);
    const int num_tiles = (tokens.end - tokens.begin + Shape::kTokens - 1) / Shape::kTokens;
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile & 1;
      reader.finish(buffer);
      __syncthreads();
      const bool has_next = tile + 1 < num_tiles;
      if (has_next) reader.ask(buffer ^ 1);
      multiply_keys<typename Reader::Mma>(queries, buffer, reader.rest(), factors.latent);
      __syncthreads();
      weigh<typename Reader::Mma>(tokens, tokens.begin + tile * Shape::kTokens, buffer, score_rows);
      if (has_next) reader.store(buffer ^ 1);
      __syncthreads();
      add_values<typename Reader::Mma>(buffer);
    }
    __syncthreads();
  }

  // What follows has another unit.
  __device__ __forceinline__ void multiply_sums(float by) {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[m][j].d[i] *= by;
      }
    }
  }

  // order: of the pairs that the sums' columns lie in. No tile is read any more.
  __device__ __forceinline__ void store(PairOrder order) {
    const int g = lane_ / 4, t = lane_ % 4;
    const int first = first_of_pair(order, t), second = second_of_pair(order, t);
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* eight = walk_.memory.output(16 * m + g + 8 * half) + 64 * warp_ + 8 * j;
          eight[first] = sums_[m][j].d[2 * half];
          eight[second] = sums_[m][j].d[2 * half + 1];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      float sum = sum_[r];
      for (int other = 1; other < kWarp; other *= 2) {
        sum += __shfl_xor_sync(kWholeWarp, sum, other);
      }
      const int row = row_of_warp(r);
      if (row < walk_.work_tile.num_rows) store_row(row, {max_[r], sum});
    }
  }

 private:
  // Below all scores, and not -infinity, from which nothing could be taken.
  static constexpr float kLeastMaximum = -1e30f;

  __device__ int row_of_warp(int r) const {
    return kRowsOfWarp * warp_ + r;
  }
  __device__ bool has_row_tile(int m) const {
    return 16 * m < walk_.work_tile.num_rows;
  }

  // A row without splits under a transform of V is finished here, others in the merge.
  __device__ __forceinline__ void store_row(int row, const Softmax2& tokens) const {
    const LatentParams& params = walk_.params;
    const LatentWorkTile& tile = walk_.work_tile;
    float* sums = walk_.memory.output(row);
    if (params.transforms_v && tile.num_splits == 1) {
      const QueryRowAt at = query_row(params, tile.kv_head, tile.first_row + row);
      finish_row(params, int64_t{tile.shape.q_start} + at.new_token, at.q_head, tokens, sums,
                 lane_);
      return;
    }
    store_latent_row(params, tile, row, tokens,
                     [&](int d) { return *reinterpret_cast<const float4*>(sums + d); });
  }

  // --- keys ---

  // Parts of the scores of 16 query rows and all tokens of the tile.
  template <class Mma>
  __device__ __forceinline__ void multiply_keys(const LatentMmaQueries& queries, int buffer,
                                                LatentRest rest, float latent_factor) {
    const int slice = warp_ / Shape::kRowTiles, row_tile = warp_ % Shape::kRowTiles;
    if (!has_row_tile(row_tile)) return;
    constexpr int kSteps = LatentMmaQueries::kSteps;
    Fragment scores[kTokenTiles] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int slab = slice * (kSteps / 4) + step / 4;
      multiply_step<Mma>(scores, queries.latent[step], buffer, slab, step % 4);
    }
    if (rest == LatentRest::kPacked) {
      multiply_step<Mma>(scores, queries.rest, buffer, Shape::kRestSlab, slice);
    } else {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n].d[i] *= latent_factor;
      }
      if (rest == LatentRest::kF16) {
        multiply_step<MmaF16>(scores, queries.rest, buffer, Shape::kRestSlab, slice);
      } else {
        multiply_step<MmaBf16>(scores, queries.rest, buffer, Shape::kRestSlab, slice);
        multiply_step<MmaBf16>(scores, queries.low, buffer, Shape::kRestSlab, slice);
      }
    }
    const int row = 16 * row_tile + lane_ / 4;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const int column = 8 * n + 2 * (lane_ % 4);
      store_shared_floats(walk_.memory.score(slice, row, column), scores[n].d[0], scores[n].d[1]);
      store_shared_floats(walk_.memory.score(slice, row + 8, column), scores[n].d[2],
                          scores[n].d[3]);
    }
  }
  // 16 numbers, step % 4 of a slab, of all tokens.
  template <class Mma>
  __device__ __forceinline__ void multiply_step(Fragment (&scores)[kTokenTiles],
                                                const uint32_t (&q)[4], int buffer, int slab,
                                                int step) const {
    const int row = lane_ % 8 + lane_ / 16 * 8, chunk = 2 * step + lane_ / 8 % 2;
    const uint32_t at = walk_.memory.slab(buffer, slab) + wgmma_chunk(row, chunk);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 k = load_matrices(at + half * 16 * 128);
      Mma::add(scores[2 * half], q[0], q[1], q[2], q[3], k.x, k.y);
      Mma::add(scores[2 * half + 1], q[0], q[1], q[2], q[3], k.z, k.w);
    }
  }

  // --- weights ---

  // token: of lane 0. Scores become 16-bit weights in shared memory.
  template <class Mma>
  __device__ __forceinline__ void weigh(TokenRange tokens, int token, int buffer,
                                        const LatentScoreRows& score_rows) {
    if (row_of_warp(0) >= walk_.work_tile.num_rows) return;
    const LatentMmaMemory& memory = walk_.memory;
    const bool is_missing = load_shared_bool(memory.missing(buffer, lane_));
    const int at = token + lane_;
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int row = row_of_warp(r);
      float score = 0;
#pragma unroll
      for (int slice = 0; slice < Shape::kSlices; ++slice) {
        score += load_shared_float(memory.score(slice, row, lane_));
      }
      score = capped(score * score_rows.scale[r] + score_rows.bias[r]);
      if (is_missing || at >= tokens.end || is_hidden(r, at)) score = -INFINITY;
      float max = score;
      for (int other = 1; other < kWarp; other *= 2) {
        max = fmaxf(max, __shfl_xor_sync(kWholeWarp, max, other));
      }
      max = fmaxf(max, max_[r]);
      const float rescale = fast_exp2(max_[r] - max);
      max_[r] = max;
      const float weight = fast_exp2(score - max);
      sum_[r] = sum_[r] * rescale + weight;
      if (lane_ == 0) store_shared_float(memory.rescale(row), rescale);
      store_shared_2(memory.weights(row) + 2 * lane_, Mma::pack(weight, 0.0f));
    }
  }
  // To units of log2, where they are not yet. tanh(x) = 1 - 2 / (e^2x + 1).
  __device__ float capped(float score) const {
    const float most = walk_.params.softcap;
    if (most == 0) return score;
    const float x = fast_exp2(score * __fdividef(2.0f * kLog2E, most));
    return most * kLog2E * (1.0f - __fdividef(2.0f, x + 1.0f));
  }
  __device__ bool is_hidden(int r, int token) const {
    if (token < seen_[r].begin || token >= seen_[r].end) return true;
    const LatentParams& params = walk_.params;
    const SequenceShape& shape = walk_.work_tile.shape;
    const int j = token - shape.first_new_token();
    if (params.tree_mask == nullptr || j < 0) return false;
    const int64_t row = int64_t{shape.q_start} + new_token_[r];
    return params.tree_mask[row * params.tree_mask_stride + j] == 0;
  }

  // --- values ---

  template <class Mma>
  __device__ __forceinline__ void add_values(int buffer) {
    rescale_sums();
    const uint32_t slab = walk_.memory.slab(buffer, warp_);
#pragma unroll
    for (int step = 0; step < Shape::kTokens / 16; ++step) {
      uint4 w[Shape::kRowTiles] = {};
#pragma unroll
      for (int m = 0; m < Shape::kRowTiles; ++m) {
        if (!has_row_tile(m)) continue;
        w[m] =
            load_matrices(walk_.memory.weights(16 * m + lane_ % 16) + 32 * step + lane_ / 16 * 16);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 v = load_matrices_transposed(slab + 16 * step * 128 +
                                                 wgmma_chunk(lane_ % 16, 2 * j + lane_ / 16));
#pragma unroll
        for (int m = 0; m < Shape::kRowTiles; ++m) {
          if (!has_row_tile(m)) continue;
          Mma::add(sums_[m][2 * j], w[m].x, w[m].y, w[m].z, w[m].w, v.x, v.y);
          Mma::add(sums_[m][2 * j + 1], w[m].x, w[m].y, w[m].z, w[m].w, v.z, v.w);
        }
      }
    }
  }
  __device__ __forceinline__ void rescale_sums() {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
      const int row = 16 * m + lane_ / 4;
      const float a = load_shared_float(walk_.memory.rescale(row));
      const float b = load_shared_float(walk_.memory.rescale(row + 8));
      if (!__any_sync(kWholeWarp, a != 1 || b != 1)) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        Fragment& sums = sums_[m][j];
        sums = {{sums.d[0] * a, sums.d[1] * a, sums.d[2] * b, sums.d[3] * b}};
      }
    }
  }

  const LatentMmaWalk& walk_;
  const int warp_;
  const int lane_;
  // Of the rows that the warp weighs; max in units of log2, sum of the lane's own tokens.
  float max_[kRowsOfWarp];
  float sum_[kRowsOfWarp];
  int new_token_[kRowsOfWarp];
  TokenRange seen_[kRowsOfWarp];
  // Of all rows, columns 64 warp to 64 warp + 63.
  Fragment sums_[Shape::kRowTiles][8];
};

}  // namespace kvx::ops::cuda
