// The latent kernel's producer of packed rows: they become f16 numbers on their way, once for keys
// and values. Codes wait where their numbers will lie: a part of a buffer takes twice or four times
// as much as its codes. Each warp has 16 tokens, and each lane decodes what it copied itself.
//
// A warp's 2 KB of a slab are its staging; codes of a part lie in the last slabs, so that numbers
// can be stored from the first on:
//   8 bits   codes of numbers 0 to 127 in the third slab, of 128 to 255 in the fourth
//   4 bits   all codes in the fourth
//
// Where the last 64 numbers are a segment of 16 bits, they are copied beside it.
#pragma once

#include "ops/attend/cuda/latent/fp8_scales.cuh"
#include "ops/attend/cuda/latent/group.cuh"

namespace kvx::ops::cuda {

template <LatentRows Rows>
class LatentPackedProducer {
  using Shape = LatentShape;

 public:
  __device__ LatentPackedProducer(const LatentWalk& walk, const LatentRing& ring, int warp)
      : walk_(walk),
        ring_(ring),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        group_(walk, warp) {}

  __device__ void run() {
    using format::FormatId;
    switch (walk_.params.tile_k.id) {
      case FormatId::kFp8E4M3:
        return fill_fp8<FormatId::kFp8E4M3>();
      case FormatId::kFp8E5M2:
        return fill_fp8<FormatId::kFp8E5M2>();
      case FormatId::kInt8:
        return fill<TileDecoder<FormatId::kInt8>>();
      case FormatId::kInt8Affine:
        return fill<TileDecoder<FormatId::kInt8Affine>>();
      case FormatId::kInt4:
        return fill<TileDecoder<FormatId::kInt4>>();
      case FormatId::kInt4Affine:
        return fill<TileDecoder<FormatId::kInt4Affine>>();
      case FormatId::kNvfp4:
        return fill<TileDecoder<FormatId::kNvfp4>>();
      default:
        return fill<TileDecoder<FormatId::kMxfp4>>();
    }
  }

 private:
  // 16 bytes of codes in a lane: rows of the warp beside each other, so that what eight lanes store
  // lies in all banks. Columns: chunks of a row that a unit has.
  template <int Columns>
  struct Unit {
    static constexpr int kChunks = Columns / 2;  // of a lane
    __device__ static int row(int lane, int i) {
      if constexpr (Columns == 2) return lane % 16;
      return lane % 8 + i % 2 * 8;
    }
    __device__ static int column(int lane, int i) {
      if constexpr (Columns == 2) return lane / 16;
      return lane / 8 + i / 2 * 4;
    }
  };
  // A part's units: one or two of the same number of columns.
  template <class Decoder, bool IsRest>
  struct PartOf {
    static constexpr int kBits = Decoder::Element::kBits;
    static constexpr int kNumbers = IsRest ? 64 : 256;
    static constexpr int kColumnsOfPart = kNumbers * kBits / 128;
    static constexpr int kUnits = kColumnsOfPart > 8 ? 2 : 1;
    static constexpr int kColumns = kColumnsOfPart / kUnits;
    static constexpr int kSlabs = kNumbers / 64;
    using UnitOfPart = Unit<kColumns>;
    static constexpr int kChunks = UnitOfPart::kChunks;
  };
  // Scales of a part's chunks, asked for with its codes.
  template <class Part>
  struct ScaleWords {
    uint32_t of[Part::kUnits * Part::kChunks];
  };

  template <format::FormatId Id>
  __device__ void fill_fp8() {
    if (has_scales_in_tile(walk_.params.tile_k)) {
      fill<LatentFp8Decoder<Id>>();
    } else {
      fill<TileDecoder<Id>>();
    }
  }

  template <class Decoder>
  __device__ void fill() {
    if constexpr (is_beside(Rows)) {
      fill_beside<Decoder>();
    } else {
      fill_rows<Decoder>();
    }
  }

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
    constexpr bool kHasScales = !std::is_same_v<Scales, NoScale>;
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
        if constexpr (kHasScales) {
          // Rows that are not there have scales of 0: what lies there may be no numbers.
          scales.of[unit * Part::kChunks + i] =
              is_there
                  ? load_scales<Scales>(side, group_.scales() + row * side.scales.token_stride +
                                                  first_byte<Scales>(column))
                  : 0;
        }
      }
    }
    commit_copies();
  }
  template <class Scales>
  __device__ int first_byte(int column) const {
    if constexpr (std::is_same_v<Scales, LatentFp8Scales>) {
      return Scales::first_byte(walk_.params, column);
    } else {
      return Scales::first_byte(walk_.params.tile_k, column);
    }
  }
  template <class Scales>
  __device__ static uint32_t load_scales(const TileSide& side, const uint8_t* from) {
    if constexpr (Scales::kBytes == 4) return *reinterpret_cast<const uint32_t*>(from);
    if constexpr (Scales::kBytes == 2) return *reinterpret_cast<const uint16_t*>(from);
    // mxfp4 has one scale of 32 numbers, mxfp4_g16 two.
    if (side.id == format::FormatId::kMxfp4) return *from;
    return *reinterpret_cast<const uint16_t*>(from);
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
        const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        store_numbers<Decoder, Part>(buffer, first_slab, unit, i, words,
                                     scales.of[unit * Part::kChunks + i]);
      }
    }
    if (part == kLeft && lane_ == 0) ring_.store_missing(buffer, warp_, is_missing);
    fence_bulk_copies();
    __syncwarp();
    if (lane_ == 0) ring_.fill(buffer, part);
  }

  template <class Decoder, class Part>
  __device__ __forceinline__ void store_numbers(int buffer, int first_slab, int unit, int i,
                                                const uint32_t (&words)[4],
                                                uint32_t scale_word) const {
    using Element = typename Decoder::Element;
    using Scales = typename Decoder::Scales;
    using UnitOfPart = typename Part::UnitOfPart;
    constexpr bool kHasScales = !std::is_same_v<Scales, NoScale>;
    constexpr int kEights = 16 / Part::kBits;  // eight numbers are a chunk of the tile
    const int eight = (unit * Part::kColumns + UnitOfPart::column(lane_, i)) * kEights;
    const int row = 16 * warp_ + UnitOfPart::row(lane_, i);
    const uint32_t to = ring_.slab(buffer, first_slab + eight / 8);
    [[maybe_unused]] ChunkScales scales = {};
    if constexpr (kHasScales) scales = Scales::of(walk_.params.tile_k, scale_word);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      Four x;
      if constexpr (Part::kBits == 8) {
        const Two low = Element::for_values(words[2 * j]);
        const Two high = Element::for_values(words[2 * j + 1]);
        x = {low.a, low.b, high.a, high.b};
      } else {
        static_assert(Part::kBits == 4);
        x = Element::for_values(words[j]);
      }
      if constexpr (kHasScales) {
#pragma unroll
        for (int k = 0; k < 4; ++k) x.r[k] = Scales::apply(scales, j, x.r[k]);
      }
      store_chunk(to + wgmma_chunk(row, eight % 8 + j), x);
    }
  }

  const LatentWalk& walk_;
  const LatentRing& ring_;
  const int warp_;
  const int lane_;
  LatentGroup group_;
};

}  // namespace kvx::ops::cuda
