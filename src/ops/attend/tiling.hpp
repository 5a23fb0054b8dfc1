// Tiling: into which pieces attention cuts its work, and the memory a piece may use. All of it
// depends on shapes only, so results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "format/spec.hpp"
#include "ops/attend/softmax_state.hpp"

namespace kvx::ops {

// A query row is one head of one token. A tile of the cache is decoded once for `rows` query rows.
struct Tiling {
  int rows;
  int tokens;     // of the cache, in a tile
  int key_chunk;  // tokens whose keys are decoded at once, to be transposed into the tile
};

inline constexpr int kMaxTileRows = 32;
inline constexpr int kScratchFloats = 15000;

constexpr int scratch_floats(const Tiling& t, int key_dim, int value_dim) {
  return t.rows * (key_dim + value_dim + t.tokens) + t.tokens * std::max(key_dim, value_dim) +
         t.key_chunk * key_dim;
}

// In order of preference: many rows reuse a decoded tile, long tiles spread the cost of a softmax
// step.
inline constexpr Tiling kTilings[] = {{32, 64, 16}, {24, 64, 16}, {24, 32, 16},
                                      {16, 32, 16}, {16, 16, 8},  {8, 16, 8},
                                      {4, 12, 4},   {2, 8, 4},    {2, 4, 4}};
inline constexpr int kNumTilings = sizeof(kTilings) / sizeof(kTilings[0]);
static_assert(scratch_floats(kTilings[kNumTilings - 1], format::kMaxHeadDim, format::kMaxHeadDim) <=
              kScratchFloats);

// Requires: both head_dims are at most kMaxHeadDim.
constexpr Tiling choose_tiling(int key_dim, int value_dim) {
  for (const Tiling& tiling : kTilings) {
    if (scratch_floats(tiling, key_dim, value_dim) <= kScratchFloats) return tiling;
  }
  return kTilings[kNumTilings - 1];
}

// What a piece remembers of a query row.
struct QueryRow {
  int first_token = 0;  // it sees tokens [first_token, end_token) of its sequence, less what a tree
  int end_token = 0;    // mask hides
  float bias = 0.0f;    // q . mean of K
  SoftmaxState softmax;
};

// The memory of a piece, on its thread's stack. Decoding adds one row of codes.
struct AttendScratch {
  alignas(64) float floats[kScratchFloats];
  QueryRow rows[kMaxTileRows];
};
static_assert(sizeof(AttendScratch) + format::kMaxHeadDim * sizeof(float) <= 64 * 1024);

}  // namespace kvx::ops
