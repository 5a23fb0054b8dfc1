// A CTA's place in a call of the latent kernels, and how its rows are stored: a split of a
// sequence's tokens and a tile of query rows.
#pragma once

#include "ops/attend/cuda/common/balance.cuh"
#include "ops/attend/cuda/latent/params.hpp"

namespace kvx::ops::cuda {

struct LatentWorkTile {
  int sequence;
  SequenceShape shape;
  int kv_head;  // of the layer
  int first_row;
  int num_rows;
  int split;
  int num_splits;   // 0: there is no such work tile
  int64_t partial;  // of row 0, where work tiles are balanced; otherwise -1
};

// What this CTA's index says. Rows: query rows of a work tile.
template <int Rows>
__device__ LatentWorkTile find_latent_work_tile(const LatentParams& params) {
  LatentWorkTile found = {.partial = -1};
  int head_and_tile = static_cast<int>(blockIdx.x);
  if (params.balance.most_work_tiles > 0) {
    const int num_of_work_tile = params.balance.num_row_tiles * params.num_heads;
    const int work_tile = head_and_tile / num_of_work_tile;
    head_and_tile %= num_of_work_tile;
    const auto [sequence, work_tiles] = sequence_of_work_tile(params, work_tile);
    found.sequence = sequence;
    found.split = work_tile - work_tiles.first;
    found.num_splits = work_tiles.num;
    if (work_tiles.num > 0 && found.split == 0 && head_and_tile == 0 && threadIdx.x == 0)
      params.balance.of_sequences[sequence] = work_tiles;
    found.partial =
        balanced_partial(params.balance, params.num_heads, work_tile,
                         head_and_tile % params.num_heads, head_and_tile / params.num_heads);
  } else {
    found.sequence = static_cast<int>(blockIdx.z);
    found.split = static_cast<int>(blockIdx.y);
    found.num_splits = params.num_splits;
  }
  if (found.num_splits == 0) return found;
  found.shape = sequence_shape(params, found.sequence);
  found.kv_head = params.first_head + head_and_tile % params.num_heads;
  found.first_row = head_and_tile / params.num_heads * Rows;
  found.num_rows = min(Rows, found.shape.q_len * params.q_per_kv - found.first_row);
  return found;
}

// A row's end, by a warp: its output, or its partial result for the merge. sums(d): its weighted
// sums d to d + 3, not normalised.
template <class Sums>
__device__ __forceinline__ void store_latent_row(const LatentParams& params,
                                                 const LatentWorkTile& work_tile, int row,
                                                 const Softmax2& tokens, const Sums& sums) {
  const QueryRowAt at = query_row(params, work_tile.kv_head, work_tile.first_row + row);
  const int64_t token = work_tile.shape.q_start + at.new_token;
  const bool is_whole = work_tile.num_splits == 1;
  int64_t index = 0;  // of the partial result
  if (!is_whole) {
    index = work_tile.partial >= 0 ? work_tile.partial + row
                                   : partial_index(params, token, at.q_head, work_tile.split);
    if (threadIdx.x % kWarp == 0) params.partial_softmax[index] = tokens;
  }
#pragma unroll 1
  for (int d = static_cast<int>(threadIdx.x) % kWarp * 4; d < kLatentValueDim; d += kWarp * 4) {
    const float4 of_four = sums(d);
    if (is_whole) {
      store_output_quad(params, token, at.q_head, d, tokens, of_four);
    } else {
      *reinterpret_cast<float4*>(params.partial_out + index * kLatentValueDim + d) = of_four;
    }
  }
}

}  // namespace kvx::ops::cuda
