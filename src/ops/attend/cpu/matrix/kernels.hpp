// MatrixKernels: products of small matrices on a CPU's matrix unit, for prompts: many query rows
// meet a tile of tokens that is decoded once.
//
// A matrix unit multiplies BF16. A float is taken apart into two of them, its BF16 and the rest's:
// 16 bits of a significand. A row of n floats becomes a row of the same size, the n high parts
// and then the n low ones. A term's error is at most 2^-18 of it for each operand that has more
// than 16 bits, and as much again where low * low is left out.
#pragma once

#include <cstdint>

#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/attend/query_row.hpp"

namespace kvx::ops::cpu {

inline constexpr int kMatrixRows = 16;   // of a unit's tile; rows are padded to a multiple
inline constexpr int kMatrixInner = 32;  // numbers that a tile multiplies
inline constexpr int kStripRows = 2 * kMatrixRows;  // that are multiplied together
inline constexpr int kStepsAStrip = 8;              // of the prefetcher

// A tile of the cache as the right operand, its tokens padded with zeros to kMaxTileTokens:
// keys [head_dim, tokens] or values [tokens, head_dim]. high and low: as many floats' memory as
// half of the numbers take; the order in them is the kernels' own.
struct MatrixTile {
  uint16_t* high;
  uint16_t* low;
  int head_dim;  // a multiple of kMatrixInner
  // The low parts are all 0: BF16 rows, and codes whose steps are powers of two.
  bool is_exact;
  // Of every token, with which its numbers are still to be multiplied, [kMaxTileTokens]; null: they
  // are what they should be. Packers write them to `scratch`.
  const float* steps;
  float* scratch;  // [kTokenStep / 2, head_dim]
};

// The products of two operands' high and low parts that a kernel adds up.
enum class MatrixParts {
  kHigh,  // high * high: an error of 2^-9 of a term for each operand
  kNotBothLow,
  kAll,
};

// target += or = left * tile, row-major; strides in floats.
struct MatrixProduct {
  const float* rows;  // [num_rows padded, stride]: high and low parts
  int stride;
  int num_rows;
  const MatrixTile* tile;
  float* target;  // [num_rows padded, target_stride]; what a padding row gets means nothing
  int target_stride;
  MatrixParts parts;
};

// A tile of kMaxTileTokens tokens that every row sees: scores, softmax and weighted sums.
struct MatrixTileParams {
  const float* queries;  // [num_rows padded, keys.head_dim]: high and low parts
  int num_rows;
  const MatrixTile& keys;
  const MatrixTile& values;
  MatrixParts key_parts;
  MatrixParts value_parts;
  QueryRow* rows;  // [num_rows]
  float softmax_scale;
  float* scores;  // [num_rows padded, kMaxTileTokens], spent
  float* sums;    // [num_rows padded, values.head_dim]
  Prefetcher& prefetcher;
};

// Makes a matrix tile of stored rows. Requires: rows.num_tokens is kMaxTileTokens, and the tile's
// is_exact is true. False: a number has no two parts, or a scale is out of reach.
struct MatrixPackers {
  bool (*pack_keys)(const PackedTile& rows, Prefetcher& prefetcher, MatrixTile& tile);
  bool (*pack_values)(const PackedTile& rows, Prefetcher& prefetcher, MatrixTile& tile);
};

struct MatrixKernels {
  // rows: [num_rows, n], n a multiple of kMatrixInner; parts: the same size. False: a number has no
  // two parts, since it is not finite or larger than 2^127.
  bool (*split_rows)(const float* rows, int num_rows, int n, float* parts);

  // In place, for numbers from 0 to 1; of a row's kMaxTileTokens those from n on become 0.
  void (*split_probabilities)(float* rows, int num_rows, int n);

  // What packs stored rows of this format straight from their bytes; null: rows are decoded first.
  // wants_low: whether the low parts are multiplied.
  const MatrixPackers* (*find_packers)(const format::FormatSpec& spec, int head_dim,
                                       bool wants_low);
  void (*attend_tile)(const MatrixTileParams&);

  // Tokens [first, first + num_tokens) of a tile, first a multiple of kTokenStep, num_tokens at
  // most that. rows: [kTokenStep, head_dim], what lies past num_tokens becomes 0. Returns false as
  // split_rows does, and takes is_exact back where it does not hold.
  bool (*pack_keys)(float* rows, int first, int num_tokens, MatrixTile& tile);
  bool (*pack_values)(float* rows, int first, int num_tokens, MatrixTile& tile);

  void (*score)(const MatrixProduct&);       // target [rows, kMaxTileTokens] = rows * keys
  void (*add_values)(const MatrixProduct&);  // target [rows, head_dim] += rows * values

  // With fewer, other kernels are faster: where a tile is decoded for them, and where not.
  int fewest_rows;
  int fewest_packed_rows;
};

}  // namespace kvx::ops::cpu
