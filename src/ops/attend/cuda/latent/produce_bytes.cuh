// The latent kernel's producer of rows in 8 bits: they become f16 numbers on their way, once for
// keys and values. Codes wait where their numbers will lie: a part of a buffer takes twice as much
// as its codes. Each warp has 16 tokens, and each lane decodes what it copied itself.
//
// A warp's 2 KB of a slab are its staging. Codes of a part's first 128 numbers lie in its third
// slab, the others in its fourth, so that numbers can be stored from the first on.
//
// Where the last 64 numbers are a segment of 16 bits, they are copied beside it.
#pragma once

#include "ops/attend/cuda/latent/packed_lane.cuh"

namespace kvx::ops::cuda {

template <LatentRows Rows>
class LatentByteProducer : LatentPackedLane {
  using Shape = LatentShape;

 public:
  using LatentPackedLane::LatentPackedLane;

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
  // Scales of a part's chunks, asked for with its codes.
  template <class Part>
  struct ScaleWords {
    uint32_t of[Part::kUnits * Part::kChunks];
  };

  // As fill_rows, but for the last 64 numbers. They are asked for when their place is free, before
  // codes are decoded, and come with the codes that are asked for next.
  template <class Decoder>
  __device__ void fill_beside() {
    using Wide = PartOf<Decoder, false>;
    const int num_tiles = 2 * walk_.num_steps;
    ScaleWords<Wide> left, right;
    bool is_missing = false;
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile & 1, step = tile >> 1;
      group_.next(tile, lane_);
      ring_.wait_free(buffer, kLeft, step);
      start<Decoder, Wide>(buffer, 0, left);
      if (tile > 0) decode<Decoder, Wide>(buffer ^ 1, kRight, Shape::kPartSlabs, right, is_missing);
      is_missing = group_.is_missing();
      ring_.wait_free(buffer, kRight, step);
      start<Decoder, Wide>(buffer, Shape::kPartSlabs, right);
      ring_.wait_free(buffer, kRest, step);
      copy_slabs(ring_, group_, group_.rest(), walk_.params.rest.token_stride, warp_, lane_, buffer,
                 Shape::kRestSlab, Shape::kKeySlabs);
      ring_.fill_by_copies(buffer, kRest);
      decode<Decoder, Wide>(buffer, kLeft, 0, left, is_missing);
    }
    if (num_tiles == 0) return;
    commit_copies();
    decode<Decoder, Wide>(1, kRight, Shape::kPartSlabs, right, is_missing);
  }

  template <class Decoder>
  __device__ void fill_rows() {
    using Wide = PartOf<Decoder, false>;
    using Rest = PartOf<Decoder, true>;
    const int num_tiles = 2 * walk_.num_steps;
    ScaleWords<Wide> left, right;
    ScaleWords<Rest> rest;
    bool is_missing = false;
    // While codes of one part are on their way, those of the part before it are decoded.
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile & 1, step = tile >> 1;
      group_.next(tile, lane_);
      ring_.wait_free(buffer, kLeft, step);
      start<Decoder, Wide>(buffer, 0, left);
      if (tile > 0) decode<Decoder, Rest>(buffer ^ 1, kRest, Shape::kRestSlab, rest, is_missing);
      ring_.wait_free(buffer, kRight, step);
      start<Decoder, Wide>(buffer, Shape::kPartSlabs, right);
      is_missing = group_.is_missing();
      decode<Decoder, Wide>(buffer, kLeft, 0, left, is_missing);
      ring_.wait_free(buffer, kRest, step);
      start<Decoder, Rest>(buffer, Shape::kRestSlab, rest);
      decode<Decoder, Wide>(buffer, kRight, Shape::kPartSlabs, right, is_missing);
    }
    if (num_tiles == 0) return;
    commit_copies();
    decode<Decoder, Rest>(1, kRest, Shape::kRestSlab, rest, is_missing);
  }

  // Where a lane's chunk waits.
  template <class Part>
  __device__ uint32_t staged(int buffer, int first_slab, int unit, int i) const {
    const int slab = first_slab + Part::kSlabs - Part::kUnits + unit;
    return ring_.slab(buffer, slab) + warp_ * 16 * 128 + i * kWarp * 16 + lane_ * 16;
  }

  template <class Decoder, class Part>
  __device__ __forceinline__ void start(int buffer, int first_slab, ScaleWords<Part>& scales) {
    using UnitOfPart = typename Part::UnitOfPart;
    using Scales = typename Decoder::Scales;
    const TileSide& side = walk_.params.tile_k;
    const int first_column = first_slab * 64 * Part::kBits / 128;
#pragma unroll
    for (int unit = 0; unit < Part::kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < Part::kChunks; ++i) {
        const int row = UnitOfPart::row(lane_, i);
        const int column = first_column + unit * Part::kColumns + UnitOfPart::column(lane_, i);
        const bool is_there = group_.has_row(row);
        const uint8_t* from = side.codes.base;
        if (is_there) from = group_.codes() + row * side.codes.token_stride + column * 16;
        copy_async_16(staged<Part>(buffer, first_slab, unit, i), from, is_there ? 16 : 0);
        if constexpr (kHasChunkScales<Decoder>) {
          // Rows that are not there have scales of 0: what lies there may be no numbers.
          uint32_t& word = scales.of[unit * Part::kChunks + i];
          word = 0;
          if (is_there) {
            const uint8_t* row_scales = group_.scales() + row * side.scales.token_stride;
            word = load_chunk_scales<Scales>(
                side, row_scales + first_scale_byte<Scales>(walk_.params, column));
          }
        }
      }
    }
    commit_copies();
  }

  // A later part's copies may be on their way.
  template <class Decoder, class Part>
  __device__ __forceinline__ void decode(int buffer, LatentPart part, int first_slab,
                                         const ScaleWords<Part>& scales, bool is_missing) {
    wait_for_copies<1>();
#pragma unroll
    for (int unit = 0; unit < Part::kUnits; ++unit) {
      uint4 codes[Part::kChunks];
#pragma unroll
      for (int i = 0; i < Part::kChunks; ++i) {
        codes[i] = load_shared_16(staged<Part>(buffer, first_slab, unit, i));
      }
      // The last unit's numbers take the place of all lanes' codes.
      if (unit + 1 == Part::kUnits) __syncwarp();
#pragma unroll
      for (int i = 0; i < Part::kChunks; ++i) {
        store_numbers<Decoder, Part>(buffer, first_slab, unit, i, codes[i],
                                     scales.of[unit * Part::kChunks + i]);
      }
    }
    fill_part(buffer, part, is_missing);
  }
};

}  // namespace kvx::ops::cuda
