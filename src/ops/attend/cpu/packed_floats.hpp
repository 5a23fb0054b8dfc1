// Attention over stored rows of floats of 16 and 8 bits that are widened in registers, everything
// in binary32.
#pragma once

#include "ops/attend/cpu/packed_loaders.hpp"
#include "ops/attend/cpu/packed_steps.hpp"
#include "ops/attend/cpu/row_chunks.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// The steps of a tile, for kernels that take numbers in parts of sixteen.
struct FloatSteps {
  const float* steps = nullptr;  // [groups, padded_tokens]; null: every step is 1
  int num_groups = 1;
  int group = 0;  // numbers
  int stride = 0;
};

template <class Loader>
KVX_INLINE FloatSteps load_float_steps(const PackedTile& tile, float* scratch) {
  if (!tile.spec->has_scale()) return {};
  const ScaleRow row = scale_row(*tile.spec, tile.head_dim);
  load_steps(tile, row, Loader::kUnit * tensor_scale_of(tile), scratch);
  const bool is_whole_row = tile.spec->group_size == format::kWholeRow;
  return {.steps = scratch,
          .num_groups = row.count,
          .group = is_whole_row ? tile.head_dim : tile.spec->group_size,
          .stride = tile.padded_tokens()};
}

// ---- Scores

// Queries are taken as they are.
inline void prepare_nothing(const format::FormatSpec&, int, const float*, int, float*) {}

// As many tokens at once as there are registers for their sums.
inline constexpr int kTokensTogether = kLanes<Widest> == 16 ? 4 : 2;

// The tokens for which a query's numbers are loaded once: all of them where the registers hold
// their numbers beside the sums.
template <class Loader>
inline constexpr int kKeysTogether = Loader::kNumbers <= 2 * kLanes<Widest> ? kTokensTogether : 1;

// sums[i][r] = tokens i's key times row r's query, lane by lane. IsGrouped: a key has several
// steps, which are multiplied in here.
template <class Loader, bool IsGrouped, int Rows>
KVX_INLINE void multiply_keys(const ScoreParams& params, const FloatSteps& steps, int row,
                              int token, Widest (*sums)[Rows]) {
  const int head_dim = params.keys.head_dim;
  const uint8_t* const* codes = params.keys.codes + token;
  constexpr int kVectors = Loader::kNumbers / kLanes<Widest>;
  constexpr int kKeys = kKeysTogether<Loader>;
  const int group = IsGrouped ? steps.group : head_dim;
  const float* of_group = IsGrouped ? steps.steps + token : nullptr;
  for (int first = 0; first < head_dim; first += group) {
    const int end = first + group < head_dim ? first + group : head_dim;
    for (int d = first; d < end; d += Loader::kNumbers) {
      for (int t = 0; t < kTokensTogether; t += kKeys) {
        Widest keys[kKeys][kVectors];
        for (int i = 0; i < kKeys; ++i) {
          Loader::load_part(codes[t + i], d, keys[i]);
          for (int v = 0; IsGrouped && v < kVectors; ++v) keys[i][v] *= of_group[t + i];
        }
        for (int v = 0; v < kVectors; ++v) {
          const float* queries = params.queries + int64_t{row} * head_dim + d + v * kLanes<Widest>;
          for (int r = 0; r < Rows; ++r) {
            const Widest query = load<Widest>(queries + int64_t{r} * head_dim);
            for (int i = 0; i < kKeys; ++i) sums[t + i][r] += keys[i][v] * query;
          }
        }
      }
      params.prefetcher.step();
    }
    if (IsGrouped) of_group += steps.stride;
  }
}

// kLanes<Widest> tokens from `token` on.
template <class Loader, bool IsGrouped, int Rows>
KVX_INLINE void score_float_rows(const ScoreParams& params, const FloatSteps& steps, int row,
                                 int token) {
  constexpr int kN = kLanes<Widest>;
  Widest products[Rows][kN];
  for (int t = 0; t < kN; t += kTokensTogether) {
    Widest sums[kTokensTogether][Rows] = {};
    multiply_keys<Loader, IsGrouped, Rows>(params, steps, row, token + t, sums);
    for (int i = 0; i < kTokensTogether; ++i) {
      for (int r = 0; r < Rows; ++r) products[r][t + i] = sums[i][r];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    Widest scores = fold_each(products[r], [](const Widest& a, const Widest& b) { return a + b; });
    if (steps.steps && !IsGrouped) scores *= load<Widest>(steps.steps + token);
    store<Widest>(scores, params.scores + (row + r) * params.scores_stride + token);
  }
}

template <class Loader, int Rows>
static void score_float_chunk(const ScoreParams& params, const FloatSteps& steps, int row) {
  for (int token = 0; token < params.keys.padded_tokens(); token += kLanes<Widest>) {
    steps.num_groups > 1 ? score_float_rows<Loader, true, Rows>(params, steps, row, token)
                         : score_float_rows<Loader, false, Rows>(params, steps, row, token);
  }
}

template <class Loader>
bool score_floats(const ScoreParams& params) {
  if (has_hidden_nan<Loader>(params.keys)) return false;
  const FloatSteps steps = load_float_steps<Loader>(params.keys, params.scratch);
  const int steps_a_chunk =
      params.keys.padded_tokens() / kTokensTogether * (params.keys.head_dim / Loader::kNumbers);
  params.prefetcher.pace(PhaseShares::kUnpackKeys + PhaseShares::kScore,
                         steps_a_chunk * num_row_chunks(params.num_rows));
  for_row_chunks(params.num_rows,
                 [&]<int Rows>(int row) { score_float_chunk<Loader, Rows>(params, steps, row); });
  return true;
}

// ---- Values

// Tokens between two steps of the prefetcher, which has as many instructions as a token's products.
inline constexpr int kTokensAStep = 4;

constexpr int value_steps(int num_tokens) {
  return (num_tokens + kTokensAStep - 1) / kTokensAStep;
}

// Parts of the loader's numbers from `number` on. weights: [Rows, kMaxTileTokens].
template <class Loader, int Rows, int Parts>
KVX_INLINE void add_float_parts(const ValueParams& params, const float* weights, int row,
                                int number) {
  constexpr int kLoaded = Loader::kNumbers / kLanes<Widest>;
  constexpr int kVectors = Parts * kLoaded;
  const int head_dim = params.values.head_dim;
  float* target = params.sums + int64_t{row} * head_dim + number;
  Widest sums[Rows][kVectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load<Widest>(target + int64_t{r} * head_dim + v * kLanes<Widest>);
    }
  }
  const int num_tokens = params.values.num_tokens;
  const uint8_t* const* codes = params.values.codes;
  for (int first = 0; first < num_tokens; first += kTokensAStep) {
    const int end = first + kTokensAStep < num_tokens ? first + kTokensAStep : num_tokens;
    for (int t = first; t < end; ++t) {
      Widest value[kVectors];
      for (int p = 0; p < Parts; ++p) {
        Loader::load_part(codes[t], number + p * Loader::kNumbers, value + p * kLoaded);
      }
      for (int r = 0; r < Rows; ++r) {
        const float weight = weights[r * kMaxTileTokens + t];
        for (int v = 0; v < kVectors; ++v) sums[r][v] += value[v] * weight;
      }
    }
    params.prefetcher.step();
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store<Widest>(sums[r][v], target + int64_t{r} * head_dim + v * kLanes<Widest>);
    }
  }
}

// weights[g][r][t] = p * step. weights: [groups, Rows, kMaxTileTokens].
template <int Rows>
KVX_INLINE void weigh_rows(const ValueParams& params, const FloatSteps& steps, int row,
                           float* weights) {
  for (int g = 0; g < steps.num_groups; ++g) {
    for (int r = 0; r < Rows; ++r, weights += kMaxTileTokens) {
      const float* p = params.p + (row + r) * params.p_stride;
      const float* group_steps = steps.steps + g * steps.stride;
      for (int t = 0; t < params.values.num_tokens; ++t) {
        weights[t] = steps.steps ? p[t] * group_steps[t] : p[t];
      }
    }
  }
}

// As many of the loader's parts at once as there are registers for their sums.
template <class Loader>
inline constexpr int kFloatPartsTogether =
    kLanes<Widest> == 16 ? 4 * kPartNumbers / Loader::kNumbers : 1;

template <class Loader, int Rows>
static void add_float_chunk(const ValueParams& params, const FloatSteps& steps, int row,
                            float* weights) {
  constexpr int kParts = kFloatPartsTogether<Loader>;
  constexpr int kGroupWeights = Rows * kMaxTileTokens;
  weigh_rows<Rows>(params, steps, row, weights);
  const int head_dim = params.values.head_dim;
  int number = 0;
  if (steps.num_groups == 1) {
    for (; number + kParts * Loader::kNumbers <= head_dim; number += kParts * Loader::kNumbers) {
      add_float_parts<Loader, Rows, kParts>(params, weights, row, number);
    }
  }
  for (; number < head_dim; number += Loader::kNumbers) {
    const int group = steps.num_groups == 1 ? 0 : number / steps.group;
    add_float_parts<Loader, Rows, 1>(params, weights + group * kGroupWeights, row, number);
  }
}

template <class Loader>
bool add_float_values(const ValueParams& params) {
  if (has_hidden_nan<Loader>(params.values)) return false;
  const FloatSteps steps = load_float_steps<Loader>(params.values, params.scratch);
  float* weights = params.scratch + steps.num_groups * params.values.padded_tokens();
  const int parts_together = steps.num_groups == 1 ? kFloatPartsTogether<Loader> : 1;
  const int passes =
      (params.values.head_dim / Loader::kNumbers + parts_together - 1) / parts_together;
  params.prefetcher.pace(
      PhaseShares::kUnpackValues + PhaseShares::kAddValues,
      passes * value_steps(params.values.num_tokens) * num_row_chunks(params.num_rows));
  for_row_chunks(params.num_rows, [&]<int Rows>(int row) {
    add_float_chunk<Loader, Rows>(params, steps, row, weights);
  });
  params.prefetcher.rest();
  return true;
}

// Rows are widened again for every chunk of query rows: with many, widening them once wins.
template <class Loader>
inline constexpr PackedKernels kFloatKernels = {prepare_nothing, score_floats<Loader>,
                                                add_float_values<Loader>, 2 * kRowChunk};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
