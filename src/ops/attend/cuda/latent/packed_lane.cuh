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

  // Chunk i of a unit becomes numbers of the slabs from first_slab on. What differs from lane to
  // lane is one offset for all chunks.
  template <class Decoder, class Part>
  __device__ __forceinline__ void store_numbers(int buffer, int first_slab, int unit, int i,
                                                const uint4& codes, uint32_t scale_word) const {
    constexpr int kEights = 16 / Part::kBits;  // eight numbers are a chunk of the tile
    const int slab = (unit * Part::kColumns + i / 2 * 4) * kEights / 8;
    const uint32_t to = ring_.slab(buffer, first_slab + slab) + i % 2 * 8 * 128;
    const uint32_t lane_at = lane_offset<Part>();
    decode_chunk<Decoder>(walk_.params.tile_k, codes, scale_word, [&](int j, const Four& x) {
      store_chunk(to + (lane_at ^ (j << 4)), x);  // chunk j of kEights, which the swizzle turns
    });
  }
  // A part's numbers are there.
  __device__ __forceinline__ void fill_part(int buffer, LatentPart part, bool is_missing) const {
    if (part == kLeft && lane_ == 0) ring_.store_missing(buffer, warp_, is_missing);
    __syncwarp();
    if (lane_ == 0) ring_.fill(buffer, part);
  }

  // From a slab to the chunk of the tile that chunk 0 of a unit begins at. A lane's other chunks
  // lie whole slabs, or eight rows, further on.
  template <class Part>
  __device__ uint32_t lane_offset() const {
    using UnitOfPart = typename Part::UnitOfPart;
    const int eight = UnitOfPart::column(lane_, 0) * (16 / Part::kBits);
    return eight / 8 * Shape::kSlabBytes +
           wgmma_chunk(16 * warp_ + UnitOfPart::row(lane_, 0), eight % 8);
  }

  const LatentWalk& walk_;
  const LatentRing& ring_;
  const int warp_;
  const int lane_;
  LatentGroup group_;
};

}  // namespace kvx::ops::cuda
