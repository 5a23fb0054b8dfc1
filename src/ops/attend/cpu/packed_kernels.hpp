// PackedKernels: scores and weighted sums of a tile straight from its stored rows, for the formats
// for which a CPU level has something better than decoding them to f32 first.
#pragma once

#include <cstdint>

#include "format/spec.hpp"

namespace kvx::ops::cpu {

class Prefetcher;

inline constexpr int kMaxTileTokens = 64;
inline constexpr int kTokenStep = 16;  // kernels take a tile's tokens in steps of this many

// The stored rows of K or V of one KV head: consecutive tokens, wherever they lie. Entries from
// num_tokens up to the next multiple of kTokenStep repeat the last token's.
struct PackedTile {
  const format::FormatSpec* spec = nullptr;
  int head_dim = 0;
  float tensor_scale = 1.0f;
  int num_tokens = 0;
  int64_t scale_group_stride = 0;         // bytes
  const uint8_t* codes[kMaxTileTokens];   // of each token
  const uint8_t* scales[kMaxTileTokens];  // of each token's group 0
  // Of the one block that the tokens are in, where the format is dual-scale.
  const uint8_t* channels = nullptr;

  int padded_tokens() const { return (num_tokens + kTokenStep - 1) / kTokenStep * kTokenStep; }
};

// A stride is the distance of two rows in floats. Kernels let the prefetcher step while they work.
struct ScoreParams {
  const PackedTile& keys;
  Prefetcher& prefetcher;
  const float* queries;   // [num_rows, head_dim]
  const float* prepared;  // what prepare_queries made of them
  int num_rows;
  float* scores;  // [num_rows, padded_tokens]: out, q . k; anything past num_tokens
  int scores_stride;
  float* scratch;
};

struct ValueParams {
  const PackedTile& values;
  Prefetcher& prefetcher;
  const float* p;  // [num_rows, num_tokens], probabilities up to the row's factor: 0 to 1
  int p_stride;
  int num_rows;
  float* sums;  // [num_rows, head_dim]: += p . v
  float* scratch;
};

// The most scratch that any of the kernels uses; prepared queries take [num_rows, head_dim] floats,
// num_rows rounded up to a multiple of four.
constexpr int packed_scratch_floats(int head_dim) {
  const int groups = head_dim / 16;
  const int code_floats = kMaxTileTokens * head_dim / 4;
  const int step_floats = kMaxTileTokens * (groups + 2) + (groups + 15) / 16 * 16 +
                          kMaxTileTokens / 2 * groups;              // as floats and as words
  const int weight_floats = 4 * 2 * groups * (kMaxTileTokens / 4);  // four rows, two digits
  return code_floats + step_floats + weight_floats;
}

inline constexpr int kAnyRows = 1 << 20;

// score and add_values return false where the tile has to be decoded first: scales that are no
// finite positive number, codes that mean NaN. The scores mean nothing then, and the sums are what
// they were.
struct PackedKernels {
  void (*prepare_queries)(const format::FormatSpec& spec, int head_dim, const float* queries,
                          int num_rows, float* prepared);
  bool (*score)(const ScoreParams&);
  bool (*add_values)(const ValueParams&);
  int most_rows;  // with more, a tile that is decoded once is faster
};

}  // namespace kvx::ops::cpu
