// Scores and weighted sums of a tile of a dual-scale block. Its codes become bytes, and the integer
// products of code_keys.hpp and code_values.hpp do the rest. The channels' steps go into the
// queries before and into the sums after; their offsets are one product a query, and one sum of
// weights.
#pragma once

#include "format/dual_scale.hpp"
#include "ops/attend/cpu/code_keys.hpp"
#include "ops/attend/cpu/code_values.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/attend/cpu/vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

inline constexpr int kMostDualRows = 8;  // at once; more go one after the other
inline constexpr int kMostDualHeadDim = 256;
inline constexpr int kUnitNumbers = 64;

// What the products count of a code: 2 and 3 bits become bytes of their own, 4 bits stay nibbles.
template <int Bits>
struct DualCode {
  using Codec = DualBytes<Bits>;
  static constexpr format::Packing kPacking = format::Packing::kBytes;
  static constexpr int kKeyMiddle = 1 << (Bits - 1);
  static constexpr int kValueMiddle = 0;
};
template <>
struct DualCode<4> {
  using Codec = format::UInt4Codec;
  static constexpr format::Packing kPacking = format::Packing::kNibbles;
  static constexpr int kKeyMiddle = 8;
  static constexpr int kValueMiddle = 8;
};

// A block's steps, and its offsets for numbers that count from `middle`.
template <int Bits>
struct DualChannels {
  alignas(64) float steps[kMostDualHeadDim];
  alignas(64) float offsets[kMostDualHeadDim];

  DualChannels(const PackedTile& tile, int middle) {
    const int n = tile.head_dim;
    const float factor = format::dual_factor(tile.channels);
    const auto shift = static_cast<float>(middle);
    for (int c = 0; c < n; ++c) {
      steps[c] = format::E4M3::decode(tile.channels[c] & 0x7Fu) * factor;
    }
    for (int c = 0; c < n; ++c) {
      const auto zero = static_cast<int8_t>(tile.channels[n + c]);
      offsets[c] = format::DualGrid<Bits>::offset(zero) + shift;
    }
  }
};

// The queries are prepared tile by tile, with the block's steps.
inline void prepare_no_queries(const format::FormatSpec&, int, const float*, int, float*) {}

// Queries times steps, and of each query the product with the offsets.
template <int Bits>
KVX_INLINE void fold_steps(const ScoreParams& params, float* queries, float* constants) {
  const DualChannels<Bits> channels(params.keys, DualCode<Bits>::kKeyMiddle);
  const int head_dim = params.keys.head_dim;
  for (int r = 0; r < params.num_rows; ++r) {
    const float* q = params.queries + int64_t{r} * head_dim;
    float* folded = queries + r * head_dim;
    Widest sums = {};
    for (int c = 0; c < head_dim; c += kIntLanes) {
      const Widest x = load<Widest>(q + c) * load<Widest>(channels.steps + c);
      store<Widest>(x, folded + c);
      sums += x * load<Widest>(channels.offsets + c);
    }
    constants[r] = sum_of_lanes(sums);
    if constexpr (Bits == 4) continue;
    for (int c = 0; c < head_dim; c += 16) order_dual_query(folded + c, folded + c);
  }
}

// The key tile of all tokens. codes: as score_codes has it.
template <int Bits>
KVX_INLINE void spread_dual_keys(const PackedTile& keys, uint8_t* codes, Prefetcher& prefetcher) {
  const int n = keys.padded_tokens();
  const int row_bytes = keys.head_dim * Bits / 8;
  constexpr int kUnitBytes = kUnitNumbers * Bits / 8;
  prefetcher.pace(PhaseShares::kUnpackKeys, n / kIntLanes * (keys.head_dim / kUnitNumbers));
  for (int token = 0; token < n; token += kIntLanes) {
    for (int offset = 0; offset < row_bytes; offset += kUnitBytes) {
      prefetcher.step();
      spread_keys<Bits>(keys.codes + token, offset, codes);
      codes += kUnitNumbers * kIntLanes;
    }
  }
}

template <int Bits, Fixed F>
KVX_INLINE bool score_dual_rows(const ScoreParams& params) {
  using Code = DualCode<Bits>;
  using Codec = typename Code::Codec;
  const PackedTile& keys = params.keys;
  const int head_dim = keys.head_dim;
  const int n = keys.padded_tokens();
  alignas(64) float queries[kMostDualRows * kMostDualHeadDim];
  alignas(64) float prepared[kMostDualRows * kMostDualHeadDim];
  float constants[kMostDualRows];
  fold_steps<Bits>(params, queries, constants);
  prepare_code_queries<Codec, Code::kPacking, F>(*keys.spec, head_dim, queries, params.num_rows,
                                                 prepared);
  const ScoreParams folded = {.keys = keys,
                              .prefetcher = params.prefetcher,
                              .queries = queries,
                              .prepared = prepared,
                              .num_rows = params.num_rows,
                              .scores = params.scores,
                              .scores_stride = params.scores_stride,
                              .scratch = params.scratch};
  // Both have the scales of the tokens first in the scratch.
  if constexpr (Bits == 4) {
    if (!score_codes<Codec, Code::kPacking, F>(folded)) return false;
  } else {
    const QueryLayout layout(*keys.spec, head_dim, F);
    for (int row = 0; row < params.num_rows; ++row) {
      if (!is_number(prepared[layout.sum_at(row)])) return false;
    }
    auto* codes = reinterpret_cast<uint8_t*>(params.scratch + n);
    load_steps(keys, scale_row(*keys.spec, head_dim), 1.0f, params.scratch);
    spread_dual_keys<Bits>(keys, codes, params.prefetcher);
    const KeyTile tile = {codes, params.scratch, nullptr};
    constexpr int kTokensAtOnce = key_vectors_together(F) * kIntLanes;
    const int steps_a_chunk = (n + kTokensAtOnce - 1) / kTokensAtOnce * (head_dim / 16);
    params.prefetcher.pace(PhaseShares::kScore, steps_a_chunk * num_row_chunks(params.num_rows));
    for_row_chunks(params.num_rows,
                   [&]<int Rows>(int row) { score_chunk<Rows, F>(folded, layout, row, tile); });
  }
  for (int r = 0; r < params.num_rows; ++r) {
    float* scores = params.scores + int64_t{r} * params.scores_stride;
    for (int t = 0; t < n; t += kIntLanes) {
      const Widest constant = load<Widest>(params.scratch + t) * constants[r];
      store<Widest>(load<Widest>(scores + t) + constant, scores + t);
    }
  }
  return true;
}

// The value tile of all tokens. codes: as add_code_values has it.
template <int Bits>
KVX_INLINE void spread_dual_values(const PackedTile& values, int8_t* codes,
                                   Prefetcher& prefetcher) {
  constexpr int kUnitBytes = kUnitNumbers * Bits / 8;
  const int num_units = values.head_dim / kUnitNumbers;
  const int num_fours = values.padded_tokens() / 4;
  prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
  for (int place = 0; place < kPlaces; ++place) {
    if (four_at(place) >= num_fours) continue;
    prefetcher.step();
    const uint8_t* const* rows = values.codes + 4 * four_at(place);
    for (int unit = 0; unit < num_units; ++unit) {
      spread_values<Bits>(
          rows, unit * kUnitBytes,
          codes + place * kPlaceBytes + unit * (kUnitNumbers / kIntLanes) * kPartBytes);
    }
  }
}

// sums += p times the scales times the codes. Of all tiles alike, the scales of the tokens over
// their largest come first in the scratch, then the largest.
template <int Bits, Fixed F>
KVX_INLINE bool add_dual_codes(const ValueParams& params) {
  using Codec = typename DualCode<Bits>::Codec;
  if constexpr (Bits == 4) {
    return add_code_values<Codec, DualCode<Bits>::kPacking, F>(params);
  } else {
    const PackedTile& values = params.values;
    const int n = values.padded_tokens();
    float* steps = params.scratch;
    float* largest = steps + n;
    load_steps(values, scale_row(*values.spec, values.head_dim), 1.0f, steps);
    auto* digits = reinterpret_cast<uint8_t*>(largest + 16);
    if (!normalize_steps(steps, 1, n, largest, nullptr)) return false;
    auto* codes = reinterpret_cast<int8_t*>(digits + kRowChunk * 128);
    spread_dual_values<Bits>(values, codes, params.prefetcher);
    int32_t corrections[kRowChunk];
    const ValueTile tile = {.codes = codes,
                            .steps = steps,
                            .words = nullptr,
                            .zeros = nullptr,
                            .largest = largest,
                            .digits = digits,
                            .corrections = kProductsMixSigns ? nullptr : corrections,
                            .num_groups = 1,
                            .group_parts = values.head_dim / kIntLanes,
                            .value_bias = 0,
                            .value_shift = 0};
    const int steps_a_chunk =
        (values.head_dim / kIntLanes + kPartsTogether - 1) / kPartsTogether * (kPlaces / 4);
    params.prefetcher.pace(PhaseShares::kAddValues,
                           steps_a_chunk * num_row_chunks(params.num_rows));
    for_row_chunks(params.num_rows,
                   [&]<int Rows>(int row) { add_chunk<Rows, F>(params, tile, row); });
    params.prefetcher.rest();
    return true;
  }
}

// The sum of a row's probabilities times its tokens' scales.
KVX_INLINE float weight_of_row(const ValueParams& params, int row) {
  const int n = params.values.padded_tokens();
  Widest p[kTileVectors];
  load_probabilities(params, row, p);
  Widest products = {};
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; ++i) {
    if (i * kIntLanes < n) products += p[i] * load<Widest>(params.scratch + i * kIntLanes);
  }
  return sum_of_lanes(products);
}

template <int Bits, Fixed F>
KVX_INLINE bool add_dual_value_rows(const ValueParams& params) {
  const int head_dim = params.values.head_dim;
  alignas(64) float sums[kMostDualRows * kMostDualHeadDim];
  memset(sums, 0, sizeof(float) * params.num_rows * head_dim);
  const ValueParams of_codes = {.values = params.values,
                                .prefetcher = params.prefetcher,
                                .p = params.p,
                                .p_stride = params.p_stride,
                                .num_rows = params.num_rows,
                                .sums = sums,
                                .scratch = params.scratch};
  if (!add_dual_codes<Bits, F>(of_codes)) return false;
  const DualChannels<Bits> channels(params.values, DualCode<Bits>::kValueMiddle);
  // The largest scale, in the unit of the products.
  const float largest =
      params.scratch[params.values.padded_tokens()] / value_unit<typename DualCode<Bits>::Codec>();
  for (int r = 0; r < params.num_rows; ++r) {
    const float weight = weight_of_row(of_codes, r) * largest;
    float* target = params.sums + int64_t{r} * head_dim;
    for (int c = 0; c < head_dim; c += kIntLanes) {
      const Widest numbers =
          load<Widest>(sums + r * head_dim + c) + load<Widest>(channels.offsets + c) * weight;
      store<Widest>(load<Widest>(target + c) + numbers * load<Widest>(channels.steps + c),
                    target + c);
    }
  }
  return true;
}

// Calls body(first, count) for kMostDualRows rows at a time, until one returns false.
template <class Body>
KVX_INLINE bool for_dual_rows(int num_rows, const Body& body) {
  for (int first = 0; first < num_rows; first += kMostDualRows) {
    const int left = num_rows - first;
    if (!body(first, left < kMostDualRows ? left : kMostDualRows)) return false;
  }
  return true;
}

template <int Bits, Fixed F>
bool score_dual(const ScoreParams& params) {
  return for_dual_rows(params.num_rows, [&](int first, int count) {
    return score_dual_rows<Bits, F>(
        {.keys = params.keys,
         .prefetcher = params.prefetcher,
         .queries = params.queries + int64_t{first} * params.keys.head_dim,
         .prepared = nullptr,
         .num_rows = count,
         .scores = params.scores + int64_t{first} * params.scores_stride,
         .scores_stride = params.scores_stride,
         .scratch = params.scratch});
  });
}

// Whether it declines depends on the tile alone: no rows have been added to when it does.
template <int Bits, Fixed F>
bool add_dual_values(const ValueParams& params) {
  return for_dual_rows(params.num_rows, [&](int first, int count) {
    return add_dual_value_rows<Bits, F>(
        {.values = params.values,
         .prefetcher = params.prefetcher,
         .p = params.p + int64_t{first} * params.p_stride,
         .p_stride = params.p_stride,
         .num_rows = count,
         .sums = params.sums + int64_t{first} * params.values.head_dim,
         .scratch = params.scratch});
  });
}

template <int Bits, Fixed OfQuery, Fixed OfWeight>
inline constexpr PackedKernels kDualKernels = {prepare_no_queries, score_dual<Bits, OfQuery>,
                                               add_dual_values<Bits, OfWeight>, kAnyRows};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
