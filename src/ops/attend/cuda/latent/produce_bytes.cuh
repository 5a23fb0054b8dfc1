// The latent kernel's producer of rows in 8 bits: they become f16 numbers on their way, once for
// keys and values. Two warpgroups decode: a warp has half of a group of 16 tokens, a lane one row.
// Codes wait where their numbers will lie, and each lane decodes what it copied itself.
//
// A warp's 1 KB of a slab are its staging. Codes of a part's first 128 numbers lie in its third
// slab, the others in its fourth, so that numbers can be stored from the first on.
//
// Where the last 64 numbers are a segment of 16 bits, they are copied beside it.
#pragma once

#include "ops/attend/cuda/latent/decode_chunk.cuh"
#include "ops/attend/cuda/latent/group.cuh"

namespace kvx::ops::cuda {

template <LatentRows Rows>
class LatentByteProducer {
  using Shape = LatentShape;

  // Of a part, a lane has every fourth chunk of its row's codes: 16 numbers of each slab.
  template <int Slabs>
  struct Part {
    static constexpr int kChunks = Slabs;
    uint32_t scales[kChunks];
  };
  using Wide = Part<Shape::kPartSlabs>;
  using Last = Part<1>;

 public:
  __device__ LatentByteProducer(const LatentWalk& walk, const LatentRing& ring, int warp)
      : walk_(walk),
        ring_(ring),
        warp_(warp % 4),
        half_(warp / 4),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        row_(warp / 4 * 8 + lane_ % 8),
        lane_offset_(wgmma_chunk(16 * warp_ + row_, lane_ / 8 * 2)),
        group_(walk, warp % 4) {}

  __device__ void run() {
    visit_latent_decoder<8>(walk_.params, [this]<class Decoder>(Decoder) {
      if constexpr (is_beside(Rows)) {
        fill_beside<Decoder>();
      } else {
        fill_rows<Decoder>();
      }
    });
  }

 private:
  // As fill_rows, but for the last 64 numbers. They are asked for when their place is free, before
  // codes are decoded, and come with the codes that are asked for next.
  template <class Decoder>
  __device__ void fill_beside() {
    const int num_tiles = 2 * walk_.num_steps;
    Wide left, right;
    bool is_missing = false;
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile & 1, step = tile >> 1;
      aim<Decoder>(tile);
      ring_.wait_free(buffer, kLeft, step);
      start<Decoder>(buffer, 0, left);
      if (tile > 0) decode<Decoder>(buffer ^ 1, kRight, Shape::kPartSlabs, right, is_missing);
      is_missing = group_.is_missing();
      ring_.wait_free(buffer, kRight, step);
      start<Decoder>(buffer, Shape::kPartSlabs, right);
      ring_.wait_free(buffer, kRest, step);
      copy_rest(buffer);
      decode<Decoder>(buffer, kLeft, 0, left, is_missing);
    }
    if (num_tiles == 0) return;
    commit_copies();
    decode<Decoder>(1, kRight, Shape::kPartSlabs, right, is_missing);
  }

  template <class Decoder>
  __device__ void fill_rows() {
    const int num_tiles = 2 * walk_.num_steps;
    Wide left, right;
    Last rest;
    bool is_missing = false;
    // While codes of one part are on their way, those of the part before it are decoded.
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile & 1, step = tile >> 1;
      aim<Decoder>(tile);
      ring_.wait_free(buffer, kLeft, step);
      start<Decoder>(buffer, 0, left);
      if (tile > 0) decode<Decoder>(buffer ^ 1, kRest, Shape::kRestSlab, rest, is_missing);
      ring_.wait_free(buffer, kRight, step);
      start<Decoder>(buffer, Shape::kPartSlabs, right);
      is_missing = group_.is_missing();
      decode<Decoder>(buffer, kLeft, 0, left, is_missing);
      ring_.wait_free(buffer, kRest, step);
      start<Decoder>(buffer, Shape::kRestSlab, rest);
      decode<Decoder>(buffer, kRight, Shape::kPartSlabs, right, is_missing);
    }
    if (num_tiles == 0) return;
    commit_copies();
    decode<Decoder>(1, kRest, Shape::kRestSlab, rest, is_missing);
  }

  // Where a lane's chunk waits: two chunks of each lane fill a warp's part of a slab.
  template <class P>
  __device__ uint32_t staged(int buffer, int first_slab, int i) const {
    const int slab = first_slab + P::kChunks - (P::kChunks + 1) / 2 + i / 2;
    return ring_.slab(buffer, slab) + (16 * warp_ + 8 * half_) * 128 + i % 2 * kWarp * 16 +
           lane_ * 16;
  }

  // Goes on to a tile: where this lane's row begins, at its first column. A row that is not there
  // is zeros, and so are its scales: what lies there may be no numbers.
  template <class Decoder>
  __device__ __forceinline__ void aim(int tile) {
    using Scales = typename Decoder::Scales;
    const TileSide& side = walk_.params.tile_k;
    group_.next(tile, lane_ == 0 && half_ == 0);
    codes_ = scales_ = kLatentZeros;
    if (!group_.has_row(row_)) return;
    codes_ = group_.codes() + row_ * side.codes.token_stride + lane_ / 8 * 16;
    scales_ = group_.scales() + row_ * side.scales.token_stride;
    if constexpr (kHasChunkScales<Decoder>) {
      scales_ += first_scale_byte<Scales>(walk_.params, lane_ / 8);
    }
  }

  // Asks for a part's codes and scales. Its columns begin at a multiple of 4, so its scales' first
  // byte and the lane's add up.
  template <class Decoder, class P>
  __device__ __forceinline__ void start(int buffer, int first_slab, P& part) {
    using Scales = typename Decoder::Scales;
    const TileSide& side = walk_.params.tile_k;
#pragma unroll
    for (int i = 0; i < P::kChunks; ++i) {
      const int column = first_slab * 4 + 4 * i;
      copy_async_16(staged<P>(buffer, first_slab, i), codes_ + column * 16, 16);
      if constexpr (kHasChunkScales<Decoder>) {
        part.scales[i] = load_chunk_scales<Scales>(
            side, scales_ + first_scale_byte<Scales>(walk_.params, column));
      } else {
        part.scales[i] = 0;
      }
    }
    commit_copies();
  }

  // A later part's copies may be on their way.
  template <class Decoder, class P>
  __device__ __forceinline__ void decode(int buffer, LatentPart of, int first_slab, const P& part,
                                         bool is_missing) const {
    wait_for_copies<1>();
#pragma unroll
    for (int first = 0; first < P::kChunks; first += 2) {
      constexpr int kAtOnce = P::kChunks < 2 ? 1 : 2;
      uint4 codes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        codes[i] = load_shared_16(staged<P>(buffer, first_slab, first + i));
      }
      // The last chunks' numbers take the place of all lanes' codes.
      if (first + kAtOnce == P::kChunks) __syncwarp();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t to = ring_.slab(buffer, first_slab + first + i);
        decode_chunk<Decoder>(
            walk_.params.tile_k, codes[i], part.scales[first + i],
            [&](int j, const Four& x) { store_chunk(to + (lane_offset_ ^ (j << 4)), x); });
      }
    }
    if (of == kLeft && lane_ == 0 && half_ == 0) {
      ring_.store_missing(buffer, warp_, is_missing);
    }
    __syncwarp();
    if (lane_ == 0) ring_.fill(buffer, of);
  }

  // The last 64 numbers, each lane a chunk of two rows.
  __device__ __forceinline__ void copy_rest(int buffer) const {
    const int chunk = lane_ % 8;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = 8 * half_ + 4 * k + lane_ / 8;
      const bool is_there = group_.has_row(row);
      const uint8_t* from = group_.somewhere();
      if (is_there) from = group_.rest() + row * walk_.params.rest.token_stride + chunk * 16;
      copy_async_16(ring_.slab(buffer, Shape::kRestSlab) + wgmma_chunk(16 * warp_ + row, chunk),
                    from, is_there ? 16 : 0);
    }
    ring_.fill_by_copies(buffer, kRest);
  }

  const LatentWalk& walk_;
  const LatentRing& ring_;
  const int warp_;  // that has the group
  const int half_;  // of the group
  const int lane_;
  const int row_;
  const uint32_t lane_offset_;  // from a slab to the lane's first chunk of the tile
  LatentGroup group_;
  const uint8_t* codes_ = nullptr;   // of the lane's row, from its first column on
  const uint8_t* scales_ = nullptr;  // likewise
};

}  // namespace kvx::ops::cuda
