// LatentPackedLane: a lane of the producer's warps that decode, whose chunks of codes become f16
// numbers of a buffer. Each warp has 16 tokens of a tile.
#pragma once

#include "ops/attend/cuda/latent/decode_chunk.cuh"
#include "ops/attend/cuda/latent/group.cuh"

namespace kvx::ops::cuda {

class LatentPackedLane {
  using Shape = LatentShape;

 public:
  __device__ LatentPackedLane(const LatentWalk& walk, const LatentRing& ring, int warp)
      : walk_(walk),
        ring_(ring),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        group_(walk, warp) {}

 protected:
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

  // Chunk i of a unit becomes numbers of the slabs from first_slab on.
  template <class Decoder, class Part>
  __device__ __forceinline__ void store_numbers(int buffer, int first_slab, int unit, int i,
                                                const uint4& codes, uint32_t scale_word) const {
    using UnitOfPart = typename Part::UnitOfPart;
    constexpr int kEights = 16 / Part::kBits;  // eight numbers are a chunk of the tile
    const int eight = (unit * Part::kColumns + UnitOfPart::column(lane_, i)) * kEights;
    const int row = 16 * warp_ + UnitOfPart::row(lane_, i);
    const uint32_t to = ring_.slab(buffer, first_slab + eight / 8);
    decode_chunk<Decoder>(walk_.params.tile_k, codes, scale_word, [&](int j, const Four& x) {
      store_chunk(to + wgmma_chunk(row, eight % 8 + j), x);
    });
  }
  // A part's numbers are there.
  __device__ __forceinline__ void fill_part(int buffer, LatentPart part, bool is_missing) const {
    if (part == kLeft && lane_ == 0) ring_.store_missing(buffer, warp_, is_missing);
    fence_bulk_copies();
    __syncwarp();
    if (lane_ == 0) ring_.fill(buffer, part);
  }

  const LatentWalk& walk_;
  const LatentRing& ring_;
  const int warp_;
  const int lane_;
  LatentGroup group_;
};

}  // namespace kvx::ops::cuda
