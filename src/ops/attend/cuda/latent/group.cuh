// LatentGroup: a producer warp's 16 tokens of a tile, which lie in one block, and where their rows
// begin.
#pragma once

#include "ops/attend/cuda/latent/shape.cuh"

namespace kvx::ops::cuda {

class LatentGroup {
 public:
  __device__ LatentGroup(const LatentWalk& walk, int warp)
      : walk_(walk),
        first_(walk.tokens.begin / kLatentStepTokens * kLatentStepTokens + 16 * warp),
        ids_{block_id(first_), block_id(first_ + kLatentTileTokens),
             block_id(first_ + 2 * kLatentTileTokens)} {}

  // Goes on to this tile, the one behind the last. A block that is not there is counted.
  __device__ void next(int tile, int lane) {
    const DecodeMmaParams& params = walk_.params;
    const int token = first_ + tile * kLatentTileTokens;
    const int id = ids_[0];
    ids_[0] = ids_[1];
    ids_[1] = ids_[2];
    ids_[2] = block_id(token + 3 * kLatentTileTokens);  // asked for before it is needed
    const bool is_there = id >= 0 && id < params.num_packed_blocks;
    if (has_tokens(token) && !is_there && lane == 0) {
      atomicAdd(&params.counters->out_of_range, 1ull);
    }
    begin_ = is_there ? walk_.tokens.begin - token : kTileTokens;
    end_ = walk_.tokens.end - token;
    is_missing_ = !is_there;
    if (!is_there) return;
    const int offset = token % params.block_size;
    const TileRegion &codes = params.tile_k.codes, &scales = params.tile_k.scales;
    codes_ = codes.at(static_cast<uint32_t>(id),
                      walk_.head * codes.head_stride + offset * codes.token_stride);
    scales_ = scales.at(static_cast<uint32_t>(id),
                        walk_.head * scales.head_stride + offset * scales.token_stride);
  }

  __device__ bool is_missing() const { return is_missing_; }
  // Whether row 0 to 15 is one of the walk's tokens. Others become zeros: what lies there may be
  // no numbers.
  __device__ bool has_row(int row) const { return row >= begin_ && row < end_; }
  // Of row 0, where the group has rows.
  __device__ const uint8_t* codes() const { return codes_; }
  __device__ const uint8_t* scales() const { return scales_; }

 private:
  __device__ bool has_tokens(int token) const {
    return token < walk_.tokens.end && token + kTileTokens > walk_.tokens.begin;
  }
  // -1 where the walk has none of the group's tokens.
  __device__ int block_id(int token) const {
    return has_tokens(token) ? walk_.table[token / walk_.params.block_size] : -1;
  }

  const LatentWalk& walk_;
  const int first_;  // token of the first tile's group
  int ids_[3];       // of the next tile's group, and of those behind
  int begin_ = 0;
  int end_ = 0;
  bool is_missing_ = false;
  const uint8_t* codes_ = nullptr;
  const uint8_t* scales_ = nullptr;
};

}  // namespace kvx::ops::cuda
