// Scores and weighted sums of a tile of a dual-scale block. Its codes become bytes, which integer
// products take as those of code_keys.hpp and code_values.hpp. The channels' steps go into the
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

inline constexpr int kMostDualHeadDim = 256;

// What the products count of a code: 2 and 3 bits become bytes of their own, 4 bits stay nibbles,
// whose values count from the middle.
template <int Bits>
struct DualCode {
  using Codec = DualBytes<Bits>;
  static constexpr float kValueMiddle = 0;
};
template <>
struct DualCode<4> {
  using Codec = format::UInt4Codec;
  static constexpr float kValueMiddle = 8;
};

// ---- A tile's scales and channels

// E4M3 numbers without a sign, exactly: one with the smallest exponent is that of 1 too large.
KVX_INLINE Widest e4m3_magnitudes(Ints bits) {
  constexpr int kExponent = (127 - 7) << 23;
  constexpr int kSmallest = 0x3C800000;  // 2^-6
  static_assert(std::bit_cast<float>(kSmallest) == 8 * format::E4M3::decode(1));
  const Ints is_small = bits < 8;
  const Ints is_nan = (bits > 0x7E) & 0x7FC00000;
  const Ints number = ((bits << 20) + kExponent + (is_small & (1 << 23))) | is_nan;
  return __builtin_bit_cast(Widest, number) - __builtin_bit_cast(Widest, is_small & kSmallest);
}

// steps[t] = the scale of token t. False: one is NaN or has a sign.
KVX_INLINE bool load_dual_scales(const PackedTile& tile, float* steps) {
  const int n = tile.padded_tokens();
  uint8_t copy[kMaxTileTokens];
  // The tokens are of one block, so that their scales lie evenly.
  const uint8_t* bytes = tile.scales[0];
  if (tile.scales[n - 1] - bytes != n - 1) {
    for (int t = 0; t < n; ++t) copy[t] = *tile.scales[t];
    bytes = copy;
  }
  Ints uncommon = {};
  for (int t = 0; t < n; t += kIntLanes) {
    const Ints bits = widen_unsigned_bytes(bytes + t);
    uncommon |= bits > 0x7E;
    store<Widest>(e4m3_magnitudes(bits), steps + t);
  }
  return sum_of_ints(uncommon) == 0;
}

// The same of scales whatever they are.
KVX_INLINE void load_any_dual_scales(const PackedTile& tile, float* steps) {
  if (load_dual_scales(tile, steps)) return;
  for (int t = 0; t < tile.padded_tokens(); ++t) steps[t] = format::E4M3::decode(*tile.scales[t]);
}

// A block's steps and offsets, in the order in which Order has the channels. Offsets are those of
// numbers that count from `middle`.
template <int Bits>
struct DualChannels {
  alignas(64) float steps[kMostDualHeadDim];
  alignas(64) float offsets[kMostDualHeadDim];

  template <class Order>
  KVX_INLINE DualChannels(const PackedTile& tile, Order, float middle) {
    using Grid = format::DualGrid<Bits>;
    const float factor = format::dual_factor(tile.channels);
    const float shift = Grid::offset(0) + middle;
    alignas(64) uint8_t bytes[2][kUnitNumbers];
    for (int first = 0; first < tile.head_dim; first += kUnitNumbers) {
      Order::sort(tile.channels + first, bytes[0]);
      Order::sort(tile.channels + tile.head_dim + first, bytes[1]);
      for (int c = 0; c < kUnitNumbers; c += kIntLanes) {
        const Ints step = widen_unsigned_bytes(bytes[0] + c) & 0x7F;
        const Ints zero = widen_signed_bytes(bytes[1] + c);
        store<Widest>(e4m3_magnitudes(step) * factor, steps + first + c);
        store<Widest>(to_floats(zero) * Grid::kZeroUnit + shift, offsets + first + c);
      }
    }
  }
};

// ---- Scores

// A chunk of rows as digits: [kRowChunk rows][high: int8 x kMostDualHeadDim][low]. A digit alone
// has a scale for each kQuerySpan numbers: fewer numbers have a smaller largest one.
inline constexpr int kDigitBytes = kMostDualHeadDim;
inline constexpr int kRowDigitBytes = 2 * kDigitBytes;
inline constexpr int kQuerySpan = kKeyChannels < 32 ? kKeyChannels : 32;
inline constexpr int kSpanLanes = kQuerySpan / 4;  // of the vectors that key_channel tells of
template <Fixed F>
inline constexpr int kQueryScales = F == Fixed::kHighDigit ? kMostDualHeadDim / 4 : 1;

template <Fixed F>
struct DualQueries {
  alignas(64) int8_t digits[kRowChunk * kRowDigitBytes];
  float scales[kRowChunk][kQueryScales<F>];  // a digit alone: of each lane of its spans
  float constants[kRowChunk];                // the products with the offsets
};

// From where codes count when a query's rounding meets them. A digit alone is so coarse that it is
// to meet small numbers.
template <int Bits, Fixed F>
inline constexpr float kKeyMiddle =
    F == Fixed::kHighDigit ? format::DualGrid<Bits>::kTopCode / 2 : 0.0f;

// prepared: [num_rows, head_dim], the queries in the order of key_channel.
template <int Bits>
void prepare_dual_queries(const format::FormatSpec&, int head_dim, const float* queries,
                          int num_rows, float* prepared) {
  const int64_t n = int64_t{num_rows} * head_dim;
  for (int64_t first = 0; first < n; first += kKeyChannels) {
    for (int i = 0; i < kKeyChannels; ++i) {
      prepared[first + i] = queries[first + key_channel<Bits>(i)];
    }
  }
}

// kKeyChannels numbers as whole ones of 1 / inverse.
KVX_INLINE void round_numbers(const float* numbers, const Widest& inverse, Ints* fixed) {
  for (int k = 0; k < 4; ++k)
    fixed[k] = to_nearest(load<Widest>(numbers + k * kIntLanes) * inverse);
}

// Two digits of head_dim numbers, of which `largest` is the largest. Returns their scale.
KVX_INLINE float make_two_digits(const float* numbers, int head_dim, float largest,
                                 int8_t* digits) {
  constexpr float kMost = 127 * 256;
  const bool counts = largest > 0x1p-100f;
  const Widest inverse = splat<Widest>(counts ? kMost / largest : 0.0f);
  for (int c = 0; c < head_dim; c += kKeyChannels) {
    Ints fixed[4];
    round_numbers(numbers + c, inverse, fixed);
    store_query_digits(fixed, digits + c, digits + kDigitBytes + c);
  }
  return counts ? largest * (1 / kMost) : 0.0f;
}

// The largest lane of each kSpanLanes, in all of them.
template <int Step = 1, int... Lane>
KVX_INLINE Widest max_of_spans(const Widest& x, std::integer_sequence<int, Lane...> lanes) {
  if constexpr (Step == kSpanLanes) {
    return x;
  } else {
    const Widest other = __builtin_shufflevector(x, x, (Lane ^ Step)...);
    return max_of_spans<2 * Step>(x > other ? x : other, lanes);
  }
}

// One digit of kKeyChannels numbers. largest: of each lane. scales: of each lane. Returns what the
// digits of the vectors' lanes sum up to.
KVX_INLINE Widest make_one_digit(const float* numbers, const Widest& largest, int8_t* digits,
                                 float* scales) {
  const Widest zero = {};
  const Widest most = max_of_spans(largest, std::make_integer_sequence<int, kIntLanes>());
  const Widest scale = most > 0x1p-100f ? most * (1.0f / 127) : zero;
  const Widest inverse = most > 0x1p-100f ? 127.0f / most : zero;
  Ints fixed[4];
  round_numbers(numbers, inverse, fixed);
  store_query_bytes(fixed, digits);
  store<Widest>(scale, scales);
  return to_floats(fixed[0] + fixed[1] + fixed[2] + fixed[3]) * scale;
}

// A query times the steps as row r of `to`. channels: with offsets from kKeyMiddle. False: digits
// cannot hold it.
template <int Bits, Fixed F>
KVX_INLINE bool fold_steps(const float* query, const DualChannels<Bits>& channels, int head_dim,
                           int r, DualQueries<F>& to) {
  alignas(64) float folded[kMostDualHeadDim];
  Widest sums = {};
  Widest largest = {};
  int8_t* digits = to.digits + r * kRowDigitBytes;
  float* scales = to.scales[r];
  for (int first = 0; first < head_dim; first += kKeyChannels) {
#pragma GCC unroll 4
    for (int c = first; c < first + kKeyChannels; c += kIntLanes) {
      const Widest x = load<Widest>(query + c) * load<Widest>(channels.steps + c);
      store<Widest>(x, folded + c);
      sums += x * load<Widest>(channels.offsets + c);
      const Widest magnitude = x < 0.0f ? -x : x;
      largest = magnitude > largest ? magnitude : largest;
    }
    if constexpr (F == Fixed::kHighDigit) {
      sums -= make_one_digit(folded + first, largest, digits + first, scales + first / 4) *
              kKeyMiddle<Bits, F>;
      largest = Widest{};
    }
  }
  if constexpr (F != Fixed::kHighDigit) {
    scales[0] = make_two_digits(folded, head_dim, max_of_lanes(largest), digits);
  }
  to.constants[r] = sum_of_lanes(sums);
  return is_number(to.constants[r]);
}

// The key tile of all tokens. codes: as KeyTile has it.
template <int Bits>
KVX_INLINE void spread_dual_keys(const PackedTile& keys, uint8_t* codes, Prefetcher& prefetcher) {
  const int n = keys.padded_tokens();
  const int row_bytes = keys.head_dim * Bits / 8;
  constexpr int kUnitBytes = kUnitNumbers * Bits / 8;
  const int steps_a_vector = Bits == 4 ? unpack_key_steps(row_bytes) : keys.head_dim / kUnitNumbers;
  prefetcher.pace(PhaseShares::kUnpackKeys, n / kIntLanes * steps_a_vector);
  for (int token = 0; token < n; token += kIntLanes) {
    uint8_t* tile = codes + int64_t{token} * keys.head_dim;
    if constexpr (Bits == 4) {
      unpack_keys<format::UInt4Codec>(keys.codes + token, row_bytes, tile, prefetcher);
    } else {
      for (int offset = 0; offset < row_bytes; offset += kUnitBytes) {
        prefetcher.step();
        spread_keys<Bits>(keys.codes + token, offset, tile);
        tile += kUnitNumbers * kIntLanes;
      }
    }
  }
}

// Sixteen numbers' products for the four words of a key tile from `keys` on.
template <int Rows, int Vectors, Fixed F>
KVX_INLINE void add_four_words(const uint8_t* keys, int distance, const int8_t* digits,
                               Ints (*high)[Vectors], Ints (*low)[Vectors]) {
  constexpr Operands kOf = Operands::kKeysAndQueries;
  constexpr bool kTwo = F != Fixed::kHighDigit;
  if constexpr (kAddsFours) {
    for (int v = 0; v < Vectors; ++v) {
      Ints words[4];
      for (int i = 0; i < 4; ++i) words[i] = load_bytes(keys + v * distance + i * 4 * kIntLanes);
      for (int r = 0; r < Rows; ++r) {
        const int8_t* of_row = digits + r * kRowDigitBytes;
        high[r][v] = add_four_dots<kOf>(high[r][v], words, of_row);
        if constexpr (kTwo) low[r][v] = add_four_dots<kOf>(low[r][v], words, of_row + kDigitBytes);
      }
    }
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Ints words[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        words[v] = load_bytes(keys + v * distance + i * 4 * kIntLanes);
      }
      for (int r = 0; r < Rows; ++r) {
        const int8_t* of_row = digits + r * kRowDigitBytes + 4 * i;
        const Ints q_high = splat_word(of_row);
        for (int v = 0; v < Vectors; ++v) high[r][v] = add_dots<kOf>(high[r][v], words[v], q_high);
        if constexpr (!kTwo) continue;
        const Ints q_low = splat_word(of_row + kDigitBytes);
        for (int v = 0; v < Vectors; ++v) low[r][v] = add_dots<kOf>(low[r][v], words[v], q_low);
      }
    }
  }
}

// Vectors vectors of tokens from `token` on for rows [row, row + Rows).
template <int Rows, int Vectors, Fixed F>
KVX_INLINE void score_dual_vectors(const ScoreParams& params, const DualQueries<F>& queries,
                                   int row, int token, const KeyTile& tile) {
  constexpr bool kOneDigit = F == Fixed::kHighDigit;
  const int head_dim = params.keys.head_dim;
  const int span = kOneDigit ? kQuerySpan : head_dim;
  const int distance = head_dim * kIntLanes;
  const uint8_t* keys = tile.codes + int64_t{token} * head_dim;
  const int8_t* digits = queries.digits;
  Widest scores[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) scores[r][v] = splat<Widest>(queries.constants[r]);
  }
  for (int s = 0; s < head_dim / span; ++s) {
    Ints high[Rows][Vectors] = {};
    Ints low[Rows][Vectors] = {};
    for (int place = 0; place < span; place += 16) {
      params.prefetcher.step();
      add_four_words<Rows, Vectors, F>(keys, distance, digits, high, low);
      keys += 16 * kIntLanes;
      digits += 16;
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        const Ints fixed = kOneDigit ? high[r][v] : join_digits(high[r][v], low[r][v]);
        scores[r][v] += to_floats(fixed) * queries.scales[r][s * (kOneDigit ? kSpanLanes : 0)];
      }
    }
  }
  for (int v = 0; v < Vectors; ++v) {
    const Widest step = load<Widest>(tile.steps + token + v * kIntLanes);
    for (int r = 0; r < Rows; ++r) {
      float* at = params.scores + (row + r) * params.scores_stride + token + v * kIntLanes;
      store<Widest>(scores[r][v] * step, at);
    }
  }
}

template <int Rows, Fixed F>
static void score_dual_chunk(const ScoreParams& params, const DualQueries<F>& queries, int row,
                             const KeyTile& tile) {
  constexpr int kVectors = key_vectors_together(F);
  const int n = params.keys.padded_tokens();
  int token = 0;
  for (; token + kVectors * kIntLanes <= n; token += kVectors * kIntLanes) {
    score_dual_vectors<Rows, kVectors, F>(params, queries, row, token, tile);
  }
  for (; token < n; token += kIntLanes) {
    score_dual_vectors<Rows, 1, F>(params, queries, row, token, tile);
  }
}

template <int Bits, Fixed F>
bool score_dual(const ScoreParams& params) {
  const PackedTile& keys = params.keys;
  const int head_dim = keys.head_dim;
  const int n = keys.padded_tokens();
  const DualChannels<Bits> channels(keys, KeyOrder<Bits>(), kKeyMiddle<Bits, F>);
  float* steps = params.scratch;
  auto* codes = reinterpret_cast<uint8_t*>(steps + n);
  load_any_dual_scales(keys, steps);
  spread_dual_keys<Bits>(keys, codes, params.prefetcher);
  const KeyTile tile = {codes, steps, nullptr};
  constexpr int kTokensAtOnce = key_vectors_together(F) * kIntLanes;
  const int steps_a_chunk = (n + kTokensAtOnce - 1) / kTokensAtOnce * (head_dim / 16);
  params.prefetcher.pace(PhaseShares::kScore, steps_a_chunk * num_row_chunks(params.num_rows));
  bool are_numbers = true;
  for_row_chunks(params.num_rows, [&]<int Rows>(int row) {
    DualQueries<F> queries;
    for (int r = 0; r < Rows; ++r) {
      const float* query = params.prepared + int64_t{row + r} * head_dim;
      are_numbers &= fold_steps<Bits, F>(query, channels, head_dim, r, queries);
    }
    score_dual_chunk<Rows, F>(params, queries, row, tile);
  });
  return are_numbers;  // if not, the scores mean nothing
}

// ---- Weighted sums

// The value tile of all tokens. codes: as ValueTile has it.
template <int Bits>
KVX_INLINE void spread_dual_values(const PackedTile& values, int8_t* codes,
                                   Prefetcher& prefetcher) {
  if constexpr (Bits == 4) {
    return unpack_values<format::UInt4Codec, format::Packing::kNibbles>(values, codes, prefetcher);
  } else {
    constexpr int kUnitBytes = kUnitNumbers * Bits / 8;
    const int num_units = values.head_dim / kUnitNumbers;
    const int num_fours = values.padded_tokens() / 4;
    prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
    for (int four = 0; four < num_fours; ++four) {
      prefetcher.step();
      const uint8_t* const* rows = values.codes + 4 * four;
      int8_t* place = codes + place_of(four) * kPlaceBytes;
      for (int unit = 0; unit < num_units; ++unit) {
        spread_values<Bits>(rows, unit * kUnitBytes,
                            place + unit * (kUnitNumbers / kIntLanes) * kPartBytes);
      }
    }
  }
}

// The sum of a row's probabilities times its tokens' scales.
KVX_INLINE float weight_of_row(const ValueParams& params, const float* steps, int row) {
  const int n = params.values.padded_tokens();
  Widest p[kTileVectors];
  load_probabilities(params, row, p);
  Widest products = {};
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; ++i) {
    if (i * kIntLanes < n) products += p[i] * load<Widest>(steps + i * kIntLanes);
  }
  return sum_of_lanes(products);
}

// target += (sums + offsets * weight) * steps, of one row. sums: in the order of the value tile.
template <int Bits>
KVX_INLINE void add_channels(const DualChannels<Bits>& channels, int head_dim, float weight,
                             const float* sums, float* target) {
  constexpr int kTogether = kUnitNumbers / kIntLanes;
  for (int first = 0; first < head_dim; first += kUnitNumbers) {
    Widest numbers[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      const int c = first + i * kIntLanes;
      numbers[i] = (load<Widest>(sums + c) + load<Widest>(channels.offsets + c) * weight) *
                   load<Widest>(channels.steps + c);
    }
    ValueOrder<Bits>::undo(numbers);
    for (int i = 0; i < kTogether; ++i) {
      float* at = target + first + i * kIntLanes;
      store<Widest>(load<Widest>(at) + numbers[i], at);
    }
  }
}

template <int Bits, Fixed F>
bool add_dual_values(const ValueParams& params) {
  using Codec = typename DualCode<Bits>::Codec;
  const PackedTile& values = params.values;
  const int head_dim = values.head_dim;
  const int n = values.padded_tokens();
  float* steps = params.scratch;
  if (!load_dual_scales(values, steps)) return false;
  auto* digits = reinterpret_cast<uint8_t*>(steps + n);
  auto* codes = reinterpret_cast<int8_t*>(digits + kRowChunk * 128);
  spread_dual_values<Bits>(values, codes, params.prefetcher);
  const DualChannels<Bits> channels(values, ValueOrder<Bits>(), DualCode<Bits>::kValueMiddle);
  constexpr float kUnit = value_unit<Codec>();
  int32_t corrections[kRowChunk];
  const ValueTile tile = {.codes = codes,
                          .steps = steps,
                          .words = nullptr,
                          .zeros = nullptr,
                          .largest = &kUnit,
                          .digits = digits,
                          .corrections = kProductsMixSigns ? nullptr : corrections,
                          .num_groups = 1,
                          .group_parts = head_dim / kIntLanes,
                          .value_bias = 0,
                          .value_shift = Bits == 4 ? CodeBytes<Codec>::kValueShift : 0};
  const int steps_a_chunk =
      (head_dim / kIntLanes + kPartsTogether - 1) / kPartsTogether * (kPlaces / 4);
  params.prefetcher.pace(PhaseShares::kAddValues, steps_a_chunk * num_row_chunks(params.num_rows));
  for_row_chunks(params.num_rows, [&]<int Rows>(int row) {
    alignas(64) float sums[kRowChunk * kMostDualHeadDim];
    memset(sums, 0, sizeof(float) * Rows * head_dim);
    const ValueParams of_chunk = {.values = values,
                                  .prefetcher = params.prefetcher,
                                  .p = params.p + int64_t{row} * params.p_stride,
                                  .p_stride = params.p_stride,
                                  .num_rows = Rows,
                                  .sums = sums,
                                  .scratch = params.scratch};
    add_chunk<Rows, F>(of_chunk, tile, 0);
    for (int r = 0; r < Rows; ++r) {
      add_channels<Bits>(channels, head_dim, weight_of_row(of_chunk, steps, r), sums + r * head_dim,
                         params.sums + int64_t{row + r} * head_dim);
    }
  });
  params.prefetcher.rest();
  return true;
}

template <int Bits, Fixed OfQuery, Fixed OfWeight>
inline constexpr PackedKernels kDualKernels = {prepare_dual_queries<Bits>,
                                               score_dual<Bits, OfQuery>,
                                               add_dual_values<Bits, OfWeight>, kAnyRows};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
