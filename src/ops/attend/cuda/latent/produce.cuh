// The latent kernel's producer of rows of 16 bits: they are copied from their blocks into the
// buffers as they are, by each warp its 16 tokens of a tile.
#pragma once

#include "ops/attend/cuda/latent/group.cuh"

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
        group_(walk, warp) {}

  __device__ void run() {
    const int num_tiles = 2 * walk_.num_steps;
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile & 1, step = tile >> 1;
      group_.next(tile, lane_);
      ring_.wait_free(buffer, kLeft, step);
      if (lane_ == 0) {
        ring_.store_missing(buffer, warp_, group_.is_missing());
        ring_.fill(buffer, kLeft);
      }
      copy(buffer, kLeft, 0, Shape::kPartSlabs);
      ring_.wait_free(buffer, kRight, step);
      copy(buffer, kRight, Shape::kPartSlabs, 2 * Shape::kPartSlabs);
      ring_.wait_free(buffer, kRest, step);
      copy(buffer, kRest, Shape::kRestSlab, Shape::kKeySlabs);
    }
  }

 private:
  // Slabs [begin, end) of the lane's rows: chunk lane % 8 of each.
  __device__ void copy(int buffer, LatentPart part, int begin, int end) const {
    const int chunk = lane_ % 8;
    const TileRegion& codes = walk_.params.tile_k.codes;
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      const int row = 4 * k + lane_ / 8;
      const bool is_there = group_.has_row(row);
      const uint8_t* from = codes.base;
      if (is_there) from = group_.codes() + row * codes.token_stride + chunk * 16;
      const uint32_t to = ring_.slab(buffer, 0) + wgmma_chunk(16 * warp_ + row, chunk);
#pragma unroll 4
      for (int slab = begin; slab < end; ++slab) {
        copy_async_16(to + slab * Shape::kSlabBytes, is_there ? from + slab * 128 : from,
                      is_there ? 16 : 0);
      }
    }
    ring_.fill_by_copies(buffer, part);
  }

  const LatentWalk& walk_;
  const LatentRing& ring_;
  const int warp_;
  const int lane_;
  LatentGroup group_;
};

}  // namespace kvx::ops::cuda
