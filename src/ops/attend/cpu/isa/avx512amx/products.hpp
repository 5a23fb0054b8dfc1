// Products of two-part matrices on AMX's tiles.
#pragma once

#include "ops/attend/cpu/isa/avx512amx/strip_softmax.hpp"

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

template <int RowTiles, bool LoadsRight>
KVX_INLINE void load_and_multiply(const uint16_t* left, int64_t stride, const uint16_t* right) {
  if constexpr (LoadsRight) _tile_loadd(6, right, 64);
  _tile_loadd(4, left, stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (LoadsRight) _tile_loadd(7, right + kTileNumbers, 64);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (RowTiles == 2) {
    _tile_loadd(5, left + kMatrixRows * (stride / 2), stride);
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

// The products that are added to the one of the operands' high parts.
struct PartsTaken {
  bool left_low;
  bool right_low;
  bool both_low;

  int products() const { return 1 + left_low + right_low + both_low; }
};
KVX_INLINE PartsTaken parts_taken(MatrixParts parts, const MatrixTile& tile) {
  const bool left_low = parts != MatrixParts::kHigh;
  const bool right_low = left_low && !tile.is_exact;
  return {left_low, right_low, right_low && parts == MatrixParts::kAll};
}

// The low parts of the left operand come first, so that each operand is loaded once where the right
// one has no low parts. between(): other work, which the processor does beside the products; it is
// called behind every one of them, since the processor looks only some hundred instructions ahead.
template <int RowTiles, class Between>
KVX_INLINE void multiply_block(const BlockOperands& of, const PartsTaken& parts,
                               const Between& between) {
  for (int i = 0; i < of.steps; ++i) {
    const uint16_t* left = of.left + i * kMatrixInner;
    const uint16_t* right = of.high + i * of.right_step;
    if (parts.left_low) {
      load_and_multiply<RowTiles, true>(left + of.low_distance, of.left_stride, right);
      between();
      load_and_multiply<RowTiles, false>(left, of.left_stride, right);
    } else {
      load_and_multiply<RowTiles, true>(left, of.left_stride, right);
    }
    between();
    if (parts.right_low) {
      load_right(of.low + i * of.right_step);
      multiply_tiles<RowTiles>();
      between();
      if (parts.both_low) {
        load_left<RowTiles>(left + of.low_distance, of.left_stride);
        multiply_tiles<RowTiles>();
        between();
      }
    }
  }
}

// A strip of one or two tiles of rows from `row` on; inner, columns: of the right operand. Adds: to
// what the target holds.
template <bool Adds, int RowTiles, class Between>
KVX_INLINE void multiply_strip(const MatrixProduct& p, int row, int inner, int columns,
                               const Between& between) {
  const PartsTaken parts = parts_taken(p.parts, *p.tile);
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
        parts, between);
    store_sums<RowTiles>(target, p.target_stride);
  }
}

template <bool Adds, class Between>
KVX_INLINE void multiply_strip(const MatrixProduct& p, int row, int inner, int columns,
                               const Between& between) {
  if (row + kMatrixRows < p.num_rows) {
    multiply_strip<Adds, 2>(p, row, inner, columns, between);
  } else {
    multiply_strip<Adds, 1>(p, row, inner, columns, between);
  }
}

template <bool Adds>
KVX_INLINE void multiply(const MatrixProduct& p, int inner, int columns) {
  const TilesHeld tiles;
  for (int row = 0; row < p.num_rows; row += kStripRows) {
    multiply_strip<Adds>(p, row, inner, columns, [] {});
  }
}

static void score_matrix(const MatrixProduct& product) {
  multiply<false>(product, product.tile->head_dim, kMaxTileTokens);
}
static void add_matrix_values(const MatrixProduct& product) {
  multiply<true>(product, kMaxTileTokens, product.tile->head_dim);
}

// ---- A tile that every row sees

// GCC's tile loads do not say that they read memory: what was stored before must stay before.
KVX_INLINE void keep_stores_before_tile_loads() {
  __asm__ volatile("" ::: "memory");
}

// Three strips are under way: while one's softmax is taken, the next one's scores and the last
// one's sums are multiplied, which are other parts of the processor.
template <bool HasSteps, bool HasLow>
[[gnu::noinline]] static void attend_strips(const MatrixTileParams& p, const TileSteps& steps) {
  const TilesHeld tiles;
  const MatrixProduct scores = {.rows = p.queries,
                                .stride = p.keys.head_dim,
                                .num_rows = p.num_rows,
                                .tile = &p.keys,
                                .target = p.scores,
                                .target_stride = kMaxTileTokens,
                                .parts = p.key_parts};
  const MatrixProduct sums = {.rows = p.scores,
                              .stride = kMaxTileTokens,
                              .num_rows = p.num_rows,
                              .tile = &p.values,
                              .target = p.sums,
                              .target_stride = p.values.head_dim,
                              .parts = p.value_parts};
  const int key_steps = p.keys.head_dim / kMatrixInner * (kMaxTileTokens / (2 * kMatrixRows)) *
                        parts_taken(p.key_parts, p.keys).products();
  const int value_steps = p.values.head_dim / (2 * kMatrixRows) * (kMaxTileTokens / kMatrixInner) *
                          parts_taken(p.value_parts, p.values).products();
  multiply_strip<false>(scores, 0, p.keys.head_dim, kMaxTileTokens, [] {});
  for (int row = 0; row < p.num_rows; row += kStripRows) {
    keep_stores_before_tile_loads();
    const bool has_next = row + kStripRows < p.num_rows;
    const bool has_last = row > 0;
    StripSoftmax<HasSteps, HasLow> strip(p, steps, row,
                                         (has_next ? key_steps : 0) + (has_last ? value_steps : 0));
    const auto between = [&] { strip.step(); };
    if (has_next) {
      multiply_strip<false>(scores, row + kStripRows, p.keys.head_dim, kMaxTileTokens, between);
    }
    if (has_last) {
      multiply_strip<true>(sums, row - kStripRows, kMaxTileTokens, p.values.head_dim, between);
    }
    strip.finish();
    for (int i = 0; i < kStepsAStrip; ++i) p.prefetcher.step();
  }
  keep_stores_before_tile_loads();
  const int last = (p.num_rows - 1) / kStripRows * kStripRows;
  multiply_strip<true>(sums, last, kMaxTileTokens, p.values.head_dim, [] {});
}

constexpr Table<float, kMaxTileTokens> ones() {
  Table<float, kMaxTileTokens> table = {};
  for (float& one : table.at) one = 1.0f;
  return table;
}

template <bool HasLow>
KVX_INLINE void attend_matrix_tile_in(const MatrixTileParams& p) {
  static constexpr Table<float, kMaxTileTokens> kOnes = ones();
  const float* keys = p.keys.steps;
  const float* values = p.values.steps;
  if (keys == nullptr && values == nullptr) return attend_strips<false, HasLow>(p, {});
  attend_strips<true, HasLow>(
      p, {keys != nullptr ? keys : kOnes.at, values != nullptr ? values : kOnes.at});
}

static void attend_matrix_tile(const MatrixTileParams& p) {
  p.value_parts == MatrixParts::kHigh ? attend_matrix_tile_in<false>(p)
                                      : attend_matrix_tile_in<true>(p);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
