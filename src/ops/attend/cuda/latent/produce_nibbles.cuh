// The latent kernel's producer of rows in 4 bits: they become f16 numbers on their way, once for
// keys and values. Codes wait in registers, both parts' of a tile: they are asked for a tile before
// their numbers' place is free, so that the memory's latency passes beside the products. Each warp
// has 16 tokens, and each lane decodes what it has loaded itself.
//
// Where the last 64 numbers are a segment of 16 bits, they are copied beside it.
#pragma once

#include "ops/attend/cuda/latent/packed_lane.cuh"

namespace kvx::ops::cuda {

template <LatentRows Rows>
class LatentNibbleProducer : LatentPackedLane {
  using Shape = LatentShape;
  static constexpr int kRightSlab = Shape::kPartSlabs;

 public:
  using LatentPackedLane::LatentPackedLane;

  __device__ void run() {
    visit_latent_decoder<4>(walk_.params,
                            [this]<class Decoder>(Decoder) { fill_tiles<Decoder>(); });
  }

 private:
  // A part's codes and scales, on their way or there.
  template <class Part>
  struct Piece {
    uint4 codes[Part::kChunks];
    uint32_t scales[Part::kChunks];
  };

  template <class Decoder>
  __device__ void fill_tiles() {
    using Wide = PartOf<Decoder, false>;
    using Last = PartOf<Decoder, true>;
    static_assert(Wide::kUnits == 1 && Last::kUnits == 1);
    const int num_tiles = 2 * walk_.num_steps;
    if (num_tiles == 0) return;
    Piece<Wide> left, right;
    Piece<Last> last;
    aim<Decoder>(0);
    load<Decoder>(left, 0);
    load<Decoder>(right, kRightSlab);
    if constexpr (!is_beside(Rows)) load<Decoder>(last, Shape::kRestSlab);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile & 1, step = tile >> 1;
      const bool is_missing = group_.is_missing();
      ring_.wait_free(buffer, kLeft, step);
      store<Decoder>(left, buffer, 0);
      fill_part(buffer, kLeft, is_missing);
      ring_.wait_free(buffer, kRight, step);
      if constexpr (is_beside(Rows)) {
        ring_.wait_free(buffer, kRest, step);
        copy_slabs(ring_, group_, group_.rest(), walk_.params.rest.token_stride, warp_, lane_,
                   buffer, Shape::kRestSlab, Shape::kKeySlabs);
        ring_.fill_by_copies(buffer, kRest);
      }
      aim<Decoder>(tile + 1);  // behind the last one there are no rows
      load<Decoder>(left, 0);
      store<Decoder>(right, buffer, kRightSlab);
      load<Decoder>(right, kRightSlab);
      fill_part(buffer, kRight, is_missing);
      if constexpr (!is_beside(Rows)) {
        ring_.wait_free(buffer, kRest, step);
        store<Decoder>(last, buffer, Shape::kRestSlab);
        load<Decoder>(last, Shape::kRestSlab);
        fill_part(buffer, kRest, is_missing);
      }
    }
  }

  // Goes on to a tile: where this lane's rows begin, at its first column. Rows that are not there
  // are zeros, and so are their scales: what lies there may be no numbers.
  template <class Decoder>
  __device__ __forceinline__ void aim(int tile) {
    using Scales = typename Decoder::Scales;
    const TileSide& side = walk_.params.tile_k;
    group_.next(tile, lane_ == 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_ % 8 + 8 * r;
      codes_[r] = scales_[r] = kLatentZeros;
      if (!group_.has_row(row)) continue;
      codes_[r] = group_.codes() + row * side.codes.token_stride + lane_ / 8 * 16;
      scales_[r] = group_.scales() + row * side.scales.token_stride +
                   first_scale_byte<Scales>(walk_.params, lane_ / 8);
    }
  }

  // A part's columns begin at a multiple of 4, so its scales' first byte and the lane's add up.
  template <class Decoder, class Part>
  __device__ __forceinline__ void load(Piece<Part>& piece, int first_slab) const {
    using Scales = typename Decoder::Scales;
    const TileSide& side = walk_.params.tile_k;
    const int first_column = first_slab * 64 * Part::kBits / 128;
    if constexpr (Part::kColumns == 2) {  // the last 64 numbers: one chunk of row lane % 16
      const int row = lane_ % 16, column = first_column + lane_ / 16;
      const uint8_t *codes = kLatentZeros, *scales = kLatentZeros;
      if (group_.has_row(row)) {
        codes = group_.codes() + row * side.codes.token_stride + column * 16;
        scales = group_.scales() + row * side.scales.token_stride +
                 first_scale_byte<Scales>(walk_.params, column);
      }
      piece.codes[0] = load_codes(codes);
      piece.scales[0] = load_chunk_scales<Scales>(side, scales);
    } else {
#pragma unroll
      for (int i = 0; i < Part::kChunks; ++i) {
        const int column = first_column + i / 2 * 4;
        piece.codes[i] = load_codes(codes_[i % 2] + column * 16);
        piece.scales[i] = load_chunk_scales<Scales>(
            side, scales_[i % 2] + first_scale_byte<Scales>(walk_.params, column));
      }
    }
  }
  // volatile: asked for where it stands. Past the first cache.
  __device__ static uint4 load_codes(const uint8_t* from) {
    uint4 r;
    asm volatile("ld.global.cg.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from)
                 : "memory");
    return r;
  }

  template <class Decoder, class Part>
  __device__ __forceinline__ void store(const Piece<Part>& piece, int buffer,
                                        int first_slab) const {
#pragma unroll
    for (int i = 0; i < Part::kChunks; ++i) {
      store_numbers<Decoder, Part>(buffer, first_slab, 0, i, piece.codes[i], piece.scales[i]);
    }
  }

  const uint8_t* codes_[2];  // of this lane's two rows of the tile
  const uint8_t* scales_[2];
};

}  // namespace kvx::ops::cuda
