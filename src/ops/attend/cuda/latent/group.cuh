// LatentGroup: a producer warp's 16 tokens of a tile, which lie in one block, and where their rows
// begin; and copies of their numbers of 16 bits.
#pragma once

#include "ops/attend/cuda/latent/shape.cuh"

namespace kvx::ops::cuda {

class LatentGroup {
 public:
  __device__ LatentGroup(const LatentWalk& walk, int warp)
      : walk_(walk),
        first_(walk.tokens.begin / kLatentStepTokens * kLatentStepTokens + 16 * warp),
        blocks_of_tile_(kLatentTileTokens / walk.params.block_size),
        rest_of_tile_(kLatentTileTokens - blocks_of_tile_ * walk.params.block_size),
        block_ahead_(first_ / walk.params.block_size),
        offset_(first_ - block_ahead_ * walk.params.block_size),
        offset_ahead_(offset_) {
    for (int i = 0; i < kAhead; ++i) {
      ids_[i] = block_id(first_ + i * kLatentTileTokens);
      advance_ahead();
    }
  }

  // Goes on to this tile, the one behind the last. counts: whether this lane counts a block that is
  // not there.
  __device__ void next(int tile, bool counts) {
    const LatentParams& params = walk_.params;
    const int token = first_ + tile * kLatentTileTokens;
    const int id = ids_[0];
    ids_[0] = ids_[1];
    ids_[1] = ids_[2];
    ids_[2] = block_id(token + kAhead * kLatentTileTokens);  // asked for before it is needed
    advance_ahead();
    const int offset = offset_;
    advance(offset_);
    const bool is_there = id >= 0 && id < params.num_packed_blocks;
    if (has_tokens(token) && !is_there && counts) {
      atomicAdd(&params.counters->out_of_range, 1ull);
    }
    begin_ = is_there ? walk_.tokens.begin - token : kTileTokens;
    end_ = walk_.tokens.end - token;
    is_missing_ = !is_there;
    if (!is_there) return;
    const TileRegion &codes = params.tile_k.codes, &scales = params.tile_k.scales;
    const TileRegion& rest = params.rest;
    codes_ = codes.at(static_cast<uint32_t>(id),
                      walk_.head * codes.head_stride + offset * codes.token_stride);
    scales_ = scales.at(static_cast<uint32_t>(id),
                        walk_.head * scales.head_stride + offset * scales.token_stride);
    rest_ = rest.at(static_cast<uint32_t>(id),
                    walk_.head * rest.head_stride + offset * rest.token_stride);
  }

  __device__ bool is_missing() const { return is_missing_; }
  // Whether row 0 to 15 is one of the walk's tokens. Others become zeros: what lies there may be
  // no numbers.
  __device__ bool has_row(int row) const { return row >= begin_ && row < end_; }
  // Bytes that may be read: what a copy of nothing names.
  __device__ const uint8_t* somewhere() const { return walk_.params.tile_k.codes.base; }
  // Of row 0, where the group has rows.
  __device__ const uint8_t* codes() const { return codes_; }
  __device__ const uint8_t* scales() const { return scales_; }
  __device__ const uint8_t* rest() const { return rest_; }

 private:
  __device__ bool has_tokens(int token) const {
    return token < walk_.tokens.end && token + kTileTokens > walk_.tokens.begin;
  }
  // Takes an offset in a block a tile further. Whether it passes the block's end, beside the whole
  // blocks of a tile.
  __device__ bool advance(int& offset) const {
    offset += rest_of_tile_;
    const bool passes = offset >= walk_.params.block_size;
    if (passes) offset -= walk_.params.block_size;
    return passes;
  }
  // Takes what is asked for next a tile further.
  __device__ void advance_ahead() {
    if (advance(offset_ahead_)) ++block_ahead_;
    block_ahead_ += blocks_of_tile_;
  }
  // Of this token, which is asked for next; -1 where the walk has none of the group's tokens.
  __device__ int block_id(int token) const {
    return has_tokens(token) ? walk_.table[block_ahead_] : -1;
  }

  const LatentWalk& walk_;
  const int first_;  // token of the first tile's group
  static constexpr int kAhead = 3;
  // Places go on by sums: a division takes as long as decoding a chunk.
  const int blocks_of_tile_;  // whole ones
  const int rest_of_tile_;    // tokens beside them
  int block_ahead_;           // in the sequence's table, of the tile that is asked for next
  int offset_;                // in its block, of the next tile's group
  int offset_ahead_;          // and of the group that is asked for next
  int ids_[kAhead];           // of the next tile's group, and of those behind
  int begin_ = 0;
  int end_ = 0;
  bool is_missing_ = false;
  const uint8_t* codes_ = nullptr;
  const uint8_t* scales_ = nullptr;
  const uint8_t* rest_ = nullptr;  // of the last 64 numbers, where they are copied
};

// What packed rows that are not there are read from: a row's bytes, at most.
__device__ __align__(16) const uint8_t kLatentZeros[kLatentKeyDim] = {};

// Copies the group's rows into slabs [begin, end) of a buffer: by each lane, chunk lane % 8 of four
// rows. base: of row 0's numbers that the first of these slabs takes, in a region of that stride.
__device__ __forceinline__ void copy_slabs(const LatentRing& ring, const LatentGroup& group,
                                           const uint8_t* base, int token_stride, int warp,
                                           int lane, int buffer, int begin, int end) {
  constexpr int kRounds = 4;
  const int chunk = lane % 8;
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int row = 4 * k + lane / 8;
    const bool is_there = group.has_row(row);
    const uint8_t* from = group.somewhere();
    if (is_there) from = base + row * token_stride + chunk * 16;
    const uint32_t to = ring.slab(buffer, begin) + wgmma_chunk(16 * warp + row, chunk);
#pragma unroll 4
    for (int slab = 0; slab < end - begin; ++slab) {
      copy_async_16(to + slab * LatentShape::kSlabBytes, is_there ? from + slab * 128 : from,
                    is_there ? 16 : 0);
    }
  }
}

}  // namespace kvx::ops::cuda
