// Products of two-part matrices on AMX's tiles.
#pragma once

#include "ops/attend/cpu/isa/avx512amx/packing.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// What LDTILECFG loads: palette 1, eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t first_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline constexpr TileConfig kTileConfig = {};

// A thread holds the tiles for one product only: they need not be saved while it does other work.
class TilesHeld {
 public:
  KVX_INLINE TilesHeld() { _tile_loadconfig(&kTileConfig); }
  KVX_INLINE ~TilesHeld() { _tile_release(); }
  TilesHeld(const TilesHeld&) = delete;
  TilesHeld& operator=(const TilesHeld&) = delete;
};

// Operands of the products of a block of two tiles of rows and two of columns, or one of rows.
struct BlockOperands {
  const uint16_t* left;  // the rows' high parts of the first numbers
  int64_t left_stride;   // bytes, from row to row
  int64_t low_distance;  // numbers, from a row's high parts to its low ones
  const uint16_t* high;  // the right operand's tiles
  const uint16_t* low;
  int64_t right_step;  // numbers, from a tile to the one with the next kMatrixInner rows
  int steps;
};

// Tiles 0 to 3 hold the sums, 4 and 5 the left operand, 6 and 7 the right one.
template <int RowTiles>
KVX_INLINE void load_left(const uint16_t* left, int64_t stride) {
  _tile_loadd(4, left, stride);
  if constexpr (RowTiles == 2) _tile_loadd(5, left + kMatrixRows * (stride / 2), stride);
}
KVX_INLINE void load_right(const uint16_t* right) {
  _tile_loadd(6, right, 64);
  _tile_loadd(7, right + kTileNumbers, 64);
}
template <int RowTiles>
KVX_INLINE void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (RowTiles == 2) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <int RowTiles>
KVX_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (RowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}
template <int RowTiles>
KVX_INLINE void load_sums(const float* target, int64_t stride) {
  _tile_loadd(0, target, stride * 4);
  _tile_loadd(1, target + kMatrixRows, stride * 4);
  if constexpr (RowTiles == 2) {
    _tile_loadd(2, target + kMatrixRows * stride, stride * 4);
    _tile_loadd(3, target + kMatrixRows * stride + kMatrixRows, stride * 4);
  }
}
template <int RowTiles>
KVX_INLINE void store_sums(float* target, int64_t stride) {
  _tile_stored(0, target, stride * 4);
  _tile_stored(1, target + kMatrixRows, stride * 4);
  if constexpr (RowTiles == 2) {
    _tile_stored(2, target + kMatrixRows * stride, stride * 4);
    _tile_stored(3, target + kMatrixRows * stride + kMatrixRows, stride * 4);
  }
}

// The low parts of the left operand come first, so that each operand is loaded once where the right
// one has no low parts.
template <int RowTiles>
KVX_INLINE void multiply_block(const BlockOperands& of, bool left_low, bool right_low,
                               bool both_low) {
  for (int i = 0; i < of.steps; ++i) {
    const uint16_t* left = of.left + i * kMatrixInner;
    load_right(of.high + i * of.right_step);
    if (left_low) {
      load_left<RowTiles>(left + of.low_distance, of.left_stride);
      multiply_tiles<RowTiles>();
    }
    load_left<RowTiles>(left, of.left_stride);
    multiply_tiles<RowTiles>();
    if (right_low) {
      load_right(of.low + i * of.right_step);
      multiply_tiles<RowTiles>();
      if (both_low) {
        load_left<RowTiles>(left + of.low_distance, of.left_stride);
        multiply_tiles<RowTiles>();
      }
    }
  }
}

// A strip of one or two tiles of rows from `row` on; inner, columns: of the right operand. Adds: to
// what the target holds.
template <bool Adds, int RowTiles>
KVX_INLINE void multiply_strip(const MatrixProduct& p, int row, int inner, int columns) {
  const bool left_low = p.parts != MatrixParts::kHigh;
  const bool right_low = left_low && !p.tile->is_exact;
  const bool both_low = p.parts == MatrixParts::kAll;
  for (int column = 0; column < columns; column += 2 * kMatrixRows) {
    const int64_t right = int64_t{column / kMatrixRows} * kTileNumbers;
    float* target = p.target + int64_t{row} * p.target_stride + column;
    if constexpr (Adds) {
      load_sums<RowTiles>(target, p.target_stride);
    } else {
      clear_sums<RowTiles>();
    }
    multiply_block<RowTiles>(
        {.left = reinterpret_cast<const uint16_t*>(p.rows + int64_t{row} * p.stride),
         .left_stride = int64_t{p.stride} * 4,
         .low_distance = inner,
         .high = p.tile->high + right,
         .low = p.tile->low + right,
         .right_step = int64_t{columns / kMatrixRows} * kTileNumbers,
         .steps = inner / kMatrixInner},
        left_low, right_low, both_low);
    store_sums<RowTiles>(target, p.target_stride);
  }
}

template <bool Adds>
KVX_INLINE void multiply(const MatrixProduct& p, int inner, int columns) {
  const TilesHeld tiles;
  int row = 0;
  for (; row + kMatrixRows < p.num_rows; row += 2 * kMatrixRows) {
    multiply_strip<Adds, 2>(p, row, inner, columns);
  }
  if (row < p.num_rows) multiply_strip<Adds, 1>(p, row, inner, columns);
}

static void score_matrix(const MatrixProduct& product) {
  multiply<false>(product, product.tile->head_dim, kMaxTileTokens);
}
static void add_matrix_values(const MatrixProduct& product) {
  multiply<true>(product, kMaxTileTokens, product.tile->head_dim);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
