// The latent kernel's producer of rows of 16 bits: they are copied from their blocks into the
// buffers as they are, by each warp its 16 tokens of a tile.
#pragma once

#include "ops/attend/cuda/latent/group.cuh"

namespace kvx::ops::cuda {

class LatentProducer {
  using Shape = LatentShape;

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
      group_.next(tile, lane_ == 0);
      ring_.wait_free(buffer, kLeft, step);
      if (lane_ == 0) {
        ring_.store_missing(buffer, warp_, group_.is_missing());
        ring_.fill(buffer, kLeft);
      }
      copy(buffer, kLeft, 0, Shape::kPartSlabs);
      ring_.wait_free(buffer, kRight, step);
      copy(buffer, kRight, Shape::kPartSlabs, 2 * Shape::kPartSlabs);
      ring_.wait_free(buffer, kRest, step);
      copy_slabs(ring_, group_, group_.rest(), walk_.params.rest.token_stride, warp_, lane_, buffer,
                 Shape::kRestSlab, Shape::kKeySlabs);
      ring_.fill_by_copies(buffer, kRest);
    }
  }

 private:
  __device__ void copy(int buffer, LatentPart part, int begin, int end) const {
    copy_slabs(ring_, group_, group_.codes() + begin * 128, walk_.params.tile_k.codes.token_stride,
               warp_, lane_, buffer, begin, end);
    ring_.fill_by_copies(buffer, part);
  }

  const LatentWalk& walk_;
  const LatentRing& ring_;
  const int warp_;
  const int lane_;
  LatentGroup group_;
};

}  // namespace kvx::ops::cuda
