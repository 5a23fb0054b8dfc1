// The latent kernel's producer: a warpgroup that copies rows of 16 bits from their blocks into the
// buffers, each warp the 16 tokens of a tile that are its own, which lie in one block.
#pragma once

#include "ops/attend/cuda/latent/shape.cuh"

namespace kvx::ops::cuda {

class LatentProducer {
  using Shape = LatentShape;
  static constexpr int kRounds = 4;  // a lane copies 16 bytes of four of its warp's rows

 public:
  __device__ LatentProducer(const LatentWalk& walk, const LatentRing& ring, int warp)
      : walk_(walk),
        ring_(ring),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        first_(walk.tokens.begin / kLatentStepTokens * kLatentStepTokens + 16 * warp) {}

  __device__ void run() {
    const int num_tiles = 2 * walk_.num_steps;
    int id = block_id(first_);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int token = first_ + tile * kLatentTileTokens;
      const int own_id = id;
      id = block_id(token + kLatentTileTokens);  // asked for before the next tile needs it
      fill(tile, token, own_id);
    }
  }

 private:
  __device__ bool has_tokens(int token) const {
    return token < walk_.tokens.end && token + 16 > walk_.tokens.begin;
  }
  // Of the group of 16 tokens; -1 where the walk has none of them.
  __device__ int block_id(int token) const {
    return has_tokens(token) ? walk_.table[token / walk_.params.block_size] : -1;
  }

  __device__ void fill(int tile, int token, int id) const {
    const int buffer = tile & 1, step = tile >> 1;
    const bool is_there = id >= 0 && id < walk_.params.num_packed_blocks;
    if (has_tokens(token) && !is_there && lane_ == 0) {
      atomicAdd(&walk_.params.counters->out_of_range, 1ull);
    }
    const TileRegion& codes = walk_.params.tile_k.codes;
    // Rows outside become zeros: what lies there may be no numbers.
    uint32_t rows = 0;
    const uint8_t* from = codes.base;
    int stride = 0;
    if (is_there) {
      const int offset = token % walk_.params.block_size + lane_ / 8;
      from = codes.at(static_cast<uint32_t>(id),
                      walk_.head * codes.head_stride + offset * codes.token_stride);
      stride = 4 * codes.token_stride;
#pragma unroll
      for (int k = 0; k < kRounds; ++k) {
        const int row = token + 4 * k + lane_ / 8;
        if (row >= walk_.tokens.begin && row < walk_.tokens.end) rows |= 1u << k;
      }
    }
    ring_.wait_free(buffer, kLeft, step);
    if (lane_ == 0) {
      asm volatile("st.shared.u8 [%0], %1;" ::"r"(ring_.missing(buffer) + warp_),
                   "r"(is_there ? 0 : 1)
                   : "memory");
      ring_.fill_facts(buffer);
    }
    copy(buffer, kLeft, 0, Shape::kPartSlabs, from, stride, rows);
    ring_.wait_free(buffer, kRight, step);
    copy(buffer, kRight, Shape::kPartSlabs, 2 * Shape::kPartSlabs, from, stride, rows);
    ring_.wait_free(buffer, kRest, step);
    copy(buffer, kRest, Shape::kRestSlab, Shape::kKeySlabs, from, stride, rows);
  }

  // Slabs [begin, end) of the lane's rows: chunk lane % 8 of each.
  __device__ void copy(int buffer, int part, int begin, int end, const uint8_t* from, int stride,
                       uint32_t rows) const {
    const int chunk = lane_ % 8;
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      const int row = 16 * warp_ + 4 * k + lane_ / 8;
      const bool is_row = (rows >> k & 1u) != 0;
      const uint8_t* at = is_row ? from + k * stride + chunk * 16 : walk_.params.tile_k.codes.base;
      const uint32_t to = ring_.slab(buffer, 0) + wgmma_chunk(row, chunk);
#pragma unroll 4
      for (int slab = begin; slab < end; ++slab) {
        copy_async_16(to + slab * Shape::kSlabBytes, is_row ? at + slab * 128 : at,
                      is_row ? 16 : 0);
      }
    }
    ring_.fill_by_copies(buffer, part);
  }

  const LatentWalk& walk_;
  const LatentRing& ring_;
  const int warp_;
  const int lane_;
  const int first_;  // token of the first tile's group
};

}  // namespace kvx::ops::cuda
