// Tiling: into which work tiles attention cuts its work, and the memory a work tile may use. All of
// it depends on shapes only, so results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "format/spec.hpp"
#include "ops/attend/cpu/matrix/kernels.hpp"
#include "ops/attend/cpu/prefetcher.hpp"
#include "ops/attend/query_row.hpp"

namespace kvx::ops {

// A query row is one head of one token. A tile of the cache is read once for `rows` query rows.
struct Tiling {
  int rows;
  int tokens;         // of the cache, in a tile
  int key_chunk;      // tokens whose keys are decoded at once, to be transposed into the tile
  int num_tiles = 1;  // that memory holds at once: a matrix unit takes K's and V's together
};

inline constexpr int kMaxUsualRows = 64;
inline constexpr int kScratchFloats = 40960;
// Of a matrix unit's work tiles, which share what a tile's decoding costs among more rows.
inline constexpr int kMaxTileRows = 128;
inline constexpr int kMatrixScratchFloats = 75776;

// What a tile is decoded to; packed kernels use the same memory.
constexpr int tile_floats(const Tiling& t, int key_dim, int value_dim) {
  return (t.num_tiles * t.tokens + t.key_chunk) * std::max(key_dim, value_dim);
}
// The queries, as they are and prepared, and the weighted sums of a KV head's rows.
constexpr int head_floats(const Tiling& t, int key_dim, int value_dim) {
  return t.rows * (2 * key_dim + value_dim);
}
constexpr int scratch_floats(const Tiling& t, int key_dim, int value_dim, int num_heads = 1) {
  return num_heads * head_floats(t, key_dim, value_dim) + t.rows * t.tokens +
         tile_floats(t, key_dim, value_dim);
}

// In order of preference: many rows reuse a tile, long tiles spread the cost of a softmax step. Few
// rows, as in decoding, leave room for longer tiles.
inline constexpr int kFewRows = 8;
inline constexpr Tiling kTilings[] = {{8, 64, 16},  {64, 64, 16}, {48, 64, 16}, {32, 64, 16},
                                      {16, 64, 16}, {16, 32, 16}, {16, 16, 16}, {8, 16, 16},
                                      {4, 12, 4},   {2, 8, 4},    {2, 4, 4}};
inline constexpr int kNumTilings = sizeof(kTilings) / sizeof(kTilings[0]);
inline constexpr int kFirstForManyRows = 1;
static_assert(scratch_floats(kTilings[kNumTilings - 1], format::kMaxHeadDim, format::kMaxHeadDim) <=
              kScratchFloats);

// Requires: both head_dims are at most kMaxHeadDim. max_rows: the most rows of a sequence and a KV
// head.
constexpr Tiling choose_tiling(int key_dim, int value_dim, int64_t max_rows) {
  for (int i = max_rows <= kFewRows ? 0 : kFirstForManyRows; i < kNumTilings; ++i) {
    if (scratch_floats(kTilings[i], key_dim, value_dim) <= kScratchFloats) return kTilings[i];
  }
  return kTilings[kNumTilings - 1];
}

constexpr bool fits_matrix_unit(int key_dim, int value_dim) {
  return key_dim % cpu::kMatrixInner == 0 && value_dim % cpu::kMatrixInner == 0;
}

// As many rows as the work has and the memory holds. No rows: use choose_tiling. Requires: the
// level has a matrix unit, and the dimensions of the first segment fit it.
constexpr Tiling choose_matrix_tiling(int key_dim, int value_dim, int64_t max_rows) {
  constexpr int kStep = cpu::kMatrixRows;
  const int64_t wanted = (max_rows + kStep - 1) / kStep * kStep;
  Tiling t = {static_cast<int>(std::min<int64_t>(wanted, kMaxTileRows)), cpu::kMaxTileTokens,
              cpu::kTokenStep, 2};
  while (t.rows > 0 && scratch_floats(t, key_dim, value_dim) > kMatrixScratchFloats) {
    t.rows -= kStep;
  }
  return max_rows <= kFewRows ? Tiling{} : t;
}

// Whether tiles have the shape, and a work tile the memory, that packed kernels need.
constexpr bool fits_packed_kernels(const Tiling& t, int key_dim, int value_dim) {
  return t.tokens % cpu::kTokenStep == 0 && t.tokens <= cpu::kMaxTileTokens &&
         cpu::packed_scratch_floats(std::max(key_dim, value_dim)) <=
             tile_floats(t, key_dim, value_dim);
}

// KV heads that a work tile with few rows may take together, where their rows lie side by side.
inline constexpr int kMaxHeadsTogether = 8;
static_assert(kMaxHeadsTogether * kFewRows <= kMaxUsualRows);

// Heads that are read tile by tile use all of what memory brings with a line of one of them; but
// they are one work tile's work, and a few threads should have some each. num_work_tiles,
// num_parts: of one head a work_tile.
constexpr int choose_heads_together(const Tiling& t, int key_dim, int value_dim, int num_kv_heads,
                                    int64_t num_work_tiles, int64_t num_parts) {
  constexpr int64_t kEnoughWorkTiles = 16;
  int heads = kMaxHeadsTogether;
  while (heads > 1 &&
         (num_kv_heads % heads != 0 || num_work_tiles * num_parts / heads < kEnoughWorkTiles ||
          scratch_floats(t, key_dim, value_dim, heads) > kScratchFloats)) {
    heads /= 2;
  }
  return t.rows <= kFewRows ? heads : 1;
}

// A long sequence is cut into parts, whose softmax states merge in the order of their index.
struct Split {
  int num_parts = 1;
  int part_tokens =
      0;  // part i of a work tile begins i * part_tokens after the work tile's first tile
};

// num_work_tiles: without a split. max_tokens: the most that a work tile reads.
inline constexpr int64_t kFewestPartTokens = 1024;  // what outweighs a part's start and its merging
constexpr Split choose_split(int64_t num_work_tiles, int64_t max_tokens) {
  constexpr int64_t kEnoughWorkTiles = 64;  // for any machine's cores to have some each
  const int64_t wanted = kEnoughWorkTiles / std::max<int64_t>(num_work_tiles, 1);
  const int64_t parts =
      std::clamp<int64_t>(max_tokens / kFewestPartTokens, 1, std::max<int64_t>(wanted, 1));
  const int64_t tile = cpu::kMaxTileTokens;
  const int64_t tokens = ((max_tokens + parts - 1) / parts + 2 * tile - 1) / tile * tile;
  return {static_cast<int>(parts), static_cast<int>(tokens)};
}

// The stored rows of a tile, K and V; none where they are to be decoded.
struct TileRows {
  int first_token = 0;
  int num_tokens = 0;
  cpu::PackedTile keys;
  cpu::PackedTile values;
};

// The memory of a work tile, on its thread's stack. Decoding adds one row of codes, and one more
// where rows lie in work_tiles.
struct AttendScratch {
  float* floats;
  QueryRow* rows;
  TileRows tiles[3];
  cpu::Prefetcher prefetcher;
};
template <int NumFloats, int NumRows>
struct AttendMemory {
  alignas(64) float floats[NumFloats];
  QueryRow rows[NumRows];
  AttendScratch scratch;
};
using UsualMemory = AttendMemory<kScratchFloats, kMaxUsualRows>;
using MatrixMemory = AttendMemory<kMatrixScratchFloats, kMaxTileRows>;
inline constexpr int kDecodeBytes = 2 * format::kMaxHeadDim * sizeof(float);
static_assert(sizeof(UsualMemory) + kDecodeBytes <= 176 * 1024);
static_assert(sizeof(MatrixMemory) + kDecodeBytes <= 316 * 1024);

}  // namespace kvx::ops
