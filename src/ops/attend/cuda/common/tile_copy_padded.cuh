// Copies of tiles whose rows are shorter than what an instance is compiled for: head_dims without
// instances of their own. In shared memory a row has the instance's length, and the end that no
// copy reaches is zeros from the ring's beginning on: it adds nothing to scores.
//
// shared memory of a tile: [16 rows, each: codes that are there, zeros][scales, rows without gaps]
#pragma once

#include <type_traits>

#include "ops/attend/cuda/common/tile_copy.cuh"

namespace kvx::ops::cuda {

// Scales of a tile in shared memory, rows of row_bytes that follow each other.
struct PaddedScales {
  uint32_t at;
  int row_bytes;
};

// As TileCopy. RowBytes, ScaleRowBytes: of the instance's rows; those that are there have
// side.row_bytes and side.scale_row_bytes.
template <int RowBytes, int ScaleRowBytes>
struct PaddedTileCopy {
  static constexpr int kCodeBytes = kTileTokens * RowBytes;
  static constexpr int kScaleBytes = kTileTokens * ScaleRowBytes;
  static constexpr int kBytes = kCodeBytes + kScaleBytes;
  static constexpr int kChannelBytes = 0;
  static constexpr int kScaleCopies = (kScaleBytes + 4 * kWarp - 1) / (4 * kWarp);  // a lane

  // This lane's part of addresses inside a block, for one head.
  struct Lane {
    int codes;
    int scales[kScaleCopies > 0 ? kScaleCopies : 1];
  };
  __device__ static Lane lane_part(const TileSide& side, int head, int lane) {
    const int units = RowBytes / side.copy_bytes;
    Lane part;
    part.codes = head * side.codes.head_stride + lane / units * side.codes.token_stride +
                 lane % units * side.copy_bytes;
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      const int byte = (i * kWarp + lane) * 4;
      part.scales[i] = side.scales.word_of_head(head) +
                       byte / side.scale_row_bytes * side.scales.token_stride +
                       byte % side.scale_row_bytes;
    }
    return part;
  }

  __device__ static void start(const TileSide& side, const Lane& part, uint32_t block, int offset,
                               int num_tokens, uint32_t to, uint32_t scales_to, int lane) {
    const uint8_t* from = side.codes.at(block, offset * side.codes.token_stride + part.codes);
    if (side.copy_bytes == 16) {
      start_codes<16>(side, from, num_tokens, to, lane);
    } else if constexpr (RowBytes <= 128) {  // of four bits
      start_codes<8>(side, from, num_tokens, to, lane);
    }
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      const int byte = (i * kWarp + lane) * 4;
      if (byte >= kTileTokens * side.scale_row_bytes) break;
      const int left = num_tokens * side.scale_row_bytes - byte;
      copy_async_4(scales_to + byte,
                   side.scales.at(block, offset * side.scales.token_stride + part.scales[i]),
                   min(max(left, 0), 4));
    }
  }

 private:
  // This lane's units of all rows.
  template <int UnitBytes>
  __device__ static void start_codes(const TileSide& side, const uint8_t* from, int num_tokens,
                                     uint32_t to, int lane) {
    constexpr int kUnits = RowBytes / UnitBytes;
    constexpr int kRowsAtOnce = kWarp / kUnits;
    const int byte = lane % kUnits * UnitBytes;
    if (byte >= side.row_bytes) return;
#pragma unroll
    for (int i = 0; i < kTileTokens / kRowsAtOnce; ++i) {
      const int row = lane / kUnits + i * kRowsAtOnce;
      const uint32_t place = chunk_address<RowBytes, true>(to, row, byte / 16) + byte % 16;
      const uint8_t* row_from = from + i * kRowsAtOnce * side.codes.token_stride;
      const int bytes = row < num_tokens ? UnitBytes : 0;
      if constexpr (UnitBytes == 16) {
        copy_async_16(place, row_from, bytes);
      } else {
        copy_async_8(place, row_from, bytes);
      }
    }
  }
};

template <int RowBytes, int ScaleRowBytes, bool Padded>
using TileCopyOf = std::conditional_t<Padded, PaddedTileCopy<RowBytes, ScaleRowBytes>,
                                      TileCopy<RowBytes, ScaleRowBytes>>;
// Where a tile's scales begin.
template <bool Padded>
using ScalesAt = std::conditional_t<Padded, PaddedScales, uint32_t>;

// Zeros from `at` on; num_bytes: a multiple of 16. By one warp, which then waits for itself.
__device__ inline void clear_shared(uint32_t at, int num_bytes, int lane) {
  for (int b = lane * 16; b < num_bytes; b += kWarp * 16) {
    store_shared_16(at + b, {});
  }
  __syncwarp();
}

}  // namespace kvx::ops::cuda
