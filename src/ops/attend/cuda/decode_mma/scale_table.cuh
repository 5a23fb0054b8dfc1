// The scales of a step's values in shared memory, in the form in which they multiply. Four or eight
// lanes need the same scale: a warp makes each once a step and leaves it here, where otherwise all
// of them would make it. Every lane makes those of two tokens.
#pragma once

#include "ops/attend/cuda/common/tile_copy.cuh"
#include "ops/attend/cuda/common/tile_scales.cuh"

namespace kvx::ops::cuda {

// Scales on operands, in f16. What a lane takes at once lies side by side: a register holds the
// scales of tokens 2 n and 2 n + 1; a chunk (32 channels) has kPlaces groups, and a lane needs the
// one in the same place of all chunks.
// [place in the chunk][pair of tokens][chunk], places on banks of their own.
template <class Scale, int Dim, int Tiles>
struct OperandScaleTable {
  static constexpr int kChunks = Dim / 32;
  static constexpr int kPlaces = 32 / Scale::kGroup;
  static constexpr int kPairs = Tiles * kTileTokens / 2;
  static constexpr int kPairBytes = kChunks * 4;
  static constexpr int kPlaceBytes = (kPairs + (kPlaces > 1 ? 4 : 0)) * kPairBytes;
  static constexpr int kBytes = kPlaces * kPlaceBytes;
  static_assert(kPairs == kWarp && (kPairBytes == 8 || kPairBytes == 16));

  struct Tile {
    uint32_t at;  // its first pair of tokens

    __device__ uint32_t of_place(int place) const { return at + place * kPlaceBytes; }
    __device__ static void load_pair(uint32_t of_place, int pair, uint32_t (&of_chunk)[kChunks]) {
      const uint32_t from = of_place + pair * kPairBytes;
      if constexpr (kChunks == 4) {
        const uint4 x = load_shared_16(from);
        of_chunk[0] = x.x, of_chunk[1] = x.y, of_chunk[2] = x.z, of_chunk[3] = x.w;
      } else {
        const uint2 x = load_shared_8(from);
        of_chunk[0] = x.x, of_chunk[1] = x.y;
      }
    }
  };
  __device__ static Tile tile(uint32_t table, int u) {
    return {table + u * (kTileTokens / 2) * kPairBytes};
  }

  // scales: of the step's tokens, as they are stored.
  __device__ static void fill(uint32_t table, uint32_t scales, int lane) {
    const auto a = Scale::load_row(scales, 2 * lane), b = Scale::load_row(scales, 2 * lane + 1);
#pragma unroll
    for (int place = 0; place < kPlaces; ++place) {
      uint32_t of_chunk[kChunks];
      Scale::pairs(a, b, place, of_chunk);
      const uint32_t to = table + place * kPlaceBytes + lane * kPairBytes;
      if constexpr (kChunks == 4) {
        store_shared_16(to, {of_chunk[0], of_chunk[1], of_chunk[2], of_chunk[3]});
      } else {
        store_shared_8(to, {of_chunk[0], of_chunk[1]});
      }
    }
  }
};

// Scales on weights, in binary32. [token][numbers of its RowScale].
template <class Scale, int Tiles>
struct WeightScaleTable {
  using Row = RowScale<Scale::kGroups>;
  static constexpr int kNumbers = Scale::kGroups + (Scale::kHasZero ? 1 : 0);
  static constexpr int kBytes = Tiles * kTileTokens * kNumbers * 4;
  static_assert(Tiles * kTileTokens == 2 * kWarp && kNumbers <= 2);

  struct Tile {
    uint32_t at;  // its first token

    __device__ Row row(int token) const {
      if constexpr (kNumbers == 1) {
        return {{__uint_as_float(load_shared_4(at + token * 4))}, 0.0f};
      } else {
        const uint2 x = load_shared_8(at + token * 8);
        Row row = {{__uint_as_float(x.x)}, 0.0f};
        (Scale::kHasZero ? row.zero : row.scale[Scale::kGroups - 1]) = __uint_as_float(x.y);
        return row;
      }
    }
  };
  __device__ static Tile tile(uint32_t table, int u) {
    return {table + u * kTileTokens * kNumbers * 4};
  }

  // a, b: of tokens 2 lane and 2 lane + 1.
  __device__ static void fill(uint32_t table, const Row& a, const Row& b, int lane) {
    if constexpr (kNumbers == 1) {
      store_shared_8(table + lane * 8, {__float_as_uint(a.scale[0]), __float_as_uint(b.scale[0])});
    } else {
      store_shared_16(table + lane * 16, {__float_as_uint(a.scale[0]), __float_as_uint(second(a)),
                                          __float_as_uint(b.scale[0]), __float_as_uint(second(b))});
    }
  }

 private:
  __device__ static float second(const Row& row) {
    return Scale::kHasZero ? row.zero : row.scale[Scale::kGroups - 1];
  }
};

}  // namespace kvx::ops::cuda
