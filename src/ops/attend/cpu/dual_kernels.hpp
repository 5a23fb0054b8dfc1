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

inline constexpr uint8_t kE4M3Nan = 0x7F;  // the bits behind the sign

// steps[t] = the scale of token t. False: one is NaN or has a sign.
KVX_INLINE bool load_dual_scales(const PackedTile& tile, float* steps) {
  const int n = tile.padded_tokens();
  uint8_t copy[kMaxTileTokens];
  // The tokens are of one block, so that their scales lie evenly, but for those that pad the tile.
  const uint8_t* bytes = tile.scales[0];
  if (tile.num_tokens != n || tile.scales[n - 1] - bytes != n - 1) {
    for (int t = 0; t < n; ++t) copy[t] = *tile.scales[t];
    bytes = copy;
  }
  for (int t = 0; t < n; t += kIntLanes) store<Widest>(common_e4m3(bytes + t), steps + t);
  return !reaches(bytes, n, 0xFF, kE4M3Nan);
}

// The same of scales whatever they are.
KVX_INLINE void load_any_dual_scales(const PackedTile& tile, float* steps) {
  if (load_dual_scales(tile, steps)) return;
  for (int t = 0; t < tile.padded_tokens(); ++t) steps[t] = format::E4M3::decode(*tile.scales[t]);
}

KVX_INLINE bool has_common_steps(const PackedTile& tile) {
  return !reaches(tile.channels, tile.head_dim, 0x7F, kE4M3Nan);
}

// A block's steps, which are common ones, and offsets, in the order in which Order has the
// channels. Offsets are those of numbers that count from `middle`.
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
        const Ints step = __builtin_bit_cast(Ints, common_e4m3(bytes[0] + c)) & 0x7FFFFFFF;
        const Ints zero = widen_bytes(bytes[1] + c);
        store<Widest>(__builtin_bit_cast(Widest, step) * factor, steps + first + c);
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

// Two digits of head_dim numbers.
KVX_INLINE void make_two_digits(const float* numbers, int head_dim, float inverse, int8_t* digits) {
  for (int c = 0; c < head_dim; c += kKeyChannels) {
    Ints fixed[4];
    round_numbers(numbers + c, splat<Widest>(inverse), fixed);
    store_query_digits(fixed, digits + c, digits + kDigitBytes + c);
  }
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

// Rows queries times the steps, as `to`. channels: with offsets from kKeyMiddle. False: digits
// cannot hold one of them. What a row waits for is done for all of them together.
template <int Bits, Fixed F, int Rows>
KVX_INLINE bool fold_steps(const float* queries, const DualChannels<Bits>& channels, int head_dim,
                           DualQueries<F>& to) {
  alignas(64) float folded[Rows][kMostDualHeadDim];
  Widest sums[Rows];
  Ints largest[Rows];  // as bits
  for (int r = 0; r < Rows; ++r, queries += head_dim) {
    sums[r] = Widest{};
    largest[r] = Ints{};
    int8_t* digits = to.digits + r * kRowDigitBytes;
    for (int first = 0; first < head_dim; first += kKeyChannels) {
#pragma GCC unroll 4
      for (int c = first; c < first + kKeyChannels; c += kIntLanes) {
        const Widest x = load<Widest>(queries + c) * load<Widest>(channels.steps + c);
        store<Widest>(x, folded[r] + c);
        sums[r] += x * load<Widest>(channels.offsets + c);
        const Ints magnitude = __builtin_bit_cast(Ints, x) & 0x7FFFFFFF;
        largest[r] = magnitude > largest[r] ? magnitude : largest[r];
      }
      if constexpr (F == Fixed::kHighDigit) {
        sums[r] -= make_one_digit(folded[r] + first, __builtin_bit_cast(Widest, largest[r]),
                                  digits + first, to.scales[r] + first / 4) *
                   kKeyMiddle<Bits, F>;
        largest[r] = Ints{};
      }
    }
  }
  bool are_numbers = true;
  float inverses[Rows];
  for (int r = 0; r < Rows; ++r) {
    to.constants[r] = sum_of_lanes(sums[r]);
    are_numbers &= is_number(to.constants[r]);
    if constexpr (F == Fixed::kHighDigit) continue;
    constexpr float kMost = 127 * 256;
    const float most = max_of_lanes(__builtin_bit_cast(Widest, largest[r]));
    const bool counts = most > 0x1p-100f;
    to.scales[r][0] = counts ? most * (1 / kMost) : 0.0f;
    inverses[r] = counts ? kMost / most : 0.0f;
  }
  if constexpr (F != Fixed::kHighDigit) {
    for (int r = 0; r < Rows; ++r) {
      make_two_digits(folded[r], head_dim, inverses[r], to.digits + r * kRowDigitBytes);
    }
  }
  return are_numbers;
}

// Calls body(rows) with the tile's rows of codes: as DenseRows where they are such, of the usual
// head_dim, else as their addresses.
template <int Bits, class Body>
KVX_INLINE void with_rows(const PackedTile& tile, const Body& body) {
  constexpr int kUsualHeadDim = 128;
  constexpr int kBytes = kUsualHeadDim * Bits / 8;
  // The tokens are of one block, so that their rows lie evenly, but for those that pad the tile:
  // six rows of three heads, by tokens and heads, end where sixteen side by side would.
  const int last = tile.padded_tokens() - 1;
  const bool is_dense =
      tile.num_tokens == last + 1 && tile.codes[last] - tile.codes[0] == int64_t{last} * kBytes;
  if (tile.head_dim == kUsualHeadDim && is_dense) {
    body.template operator()<kUsualHeadDim>(DenseRows<kBytes>{tile.codes[0]});
  } else {
    body.template operator()<0>(tile.codes);
  }
}

// The key tile of all tokens. codes: as KeyTile has it.
template <int Bits>
KVX_INLINE void spread_dual_keys(const PackedTile& keys, uint8_t* codes, Prefetcher& prefetcher) {
  const int n = keys.padded_tokens();
  if constexpr (Bits == 4) {
    const int row_bytes = keys.head_dim * Bits / 8;
    prefetcher.pace(PhaseShares::kUnpackKeys, n / kIntLanes * unpack_key_steps(row_bytes));
    for (int token = 0; token < n; token += kIntLanes) {
      unpack_keys<format::UInt4Codec>(keys.codes + token, row_bytes,
                                      codes + int64_t{token} * keys.head_dim, prefetcher);
    }
  } else {
    constexpr int kUnitBytes = kUnitNumbers * Bits / 8;
    prefetcher.pace(PhaseShares::kUnpackKeys, n / kIntLanes * (keys.head_dim / kUnitNumbers));
    with_rows<Bits>(keys, [&]<int HeadDim, class Rows>(Rows rows) {
      const int num_units = (HeadDim > 0 ? HeadDim : keys.head_dim) / kUnitNumbers;
      for (int token = 0; token < n; token += kIntLanes) {
        for (int unit = 0; unit < num_units; ++unit) {
          prefetcher.step();
          spread_keys<Bits>(rows + token, unit * kUnitBytes, codes);
          codes += kUnitNumbers * kIntLanes;
        }
      }
    });
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
  if (!has_common_steps(keys)) return false;
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
    const float* prepared = params.prepared + int64_t{row} * head_dim;
    are_numbers &= fold_steps<Bits, F, Rows>(prepared, channels, head_dim, queries);
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
    static constexpr Table<int, kPlaces> kPlaceOf = [] {
      Table<int, kPlaces> places = {};
      for (int place = 0; place < kPlaces; ++place) places.at[four_at(place)] = place;
      return places;
    }();
    const int num_fours = values.padded_tokens() / 4;
    prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
    with_rows<Bits>(values, [&]<int HeadDim, class Rows>(Rows rows) {
      const int num_units = (HeadDim > 0 ? HeadDim : values.head_dim) / kUnitNumbers;
      for (int four = 0; four < num_fours; ++four) {
        prefetcher.step();
        int8_t* place = codes + kPlaceOf.at[four] * kPlaceBytes;
        for (int unit = 0; unit < num_units; ++unit) {
          spread_values<Bits>(rows + 4 * four, unit * kUnitBytes,
                              place + unit * (kUnitNumbers / kIntLanes) * kPartBytes);
        }
      }
    });
  }
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

// A chunk of rows' probabilities times their tokens' scales.
struct DualWeights {
  float units[kRowChunk];  // what sums of the digits' products are to be multiplied with
  float sums[kRowChunk];
};

// digits: as ValueTile has it. What a row waits for is done for all of them together.
template <int Rows>
KVX_INLINE void weigh_dual_rows(const ValueParams& params, const float* steps, int row,
                                uint8_t* digits, DualWeights& weights) {
  constexpr float kNegligible = 0x1p-70f;  // beside a probability of 1 and the largest scale
  const int n = params.values.padded_tokens();
  Widest p[Rows][kTileVectors];
  Widest sums[Rows];
  for (int r = 0; r < Rows; ++r) {
    load_probabilities(params, row + r, p[r]);
    sums[r] = Widest{};
#pragma GCC unroll 8
    for (int i = 0; i < kTileVectors; ++i) {
      if (i * kIntLanes >= n) continue;
      p[r][i] *= load<Widest>(steps + i * kIntLanes);
      sums[r] += p[r][i];
    }
  }
  float inverses[Rows];
  for (int r = 0; r < Rows; ++r) {
    const float most = most_of(p[r]);
    const bool counts = most > kNegligible;
    weights.units[r] = counts ? most / kMostWord : 0.0f;
    weights.sums[r] = sum_of_lanes(sums[r]);
    inverses[r] = counts ? kMostWord / most : 0.0f;
  }
  for (int r = 0; r < Rows; ++r) {
    Words words[kWordVectors];
    weights_to_words(p[r], inverses[r], words);
    for (int i = 0; i < kWordVectors; i += 2) {
      store_weights<Fixed::kTwoDigits>(words[i], words[i + 1], i * 2 * kIntLanes, digits + r * 128);
    }
  }
}

template <int Bits>
bool add_dual_values(const ValueParams& params) {
  using Codec = typename DualCode<Bits>::Codec;
  const PackedTile& values = params.values;
  const int head_dim = values.head_dim;
  const int n = values.padded_tokens();
  float* steps = params.scratch;
  if (!has_common_steps(values) || !load_dual_scales(values, steps)) return false;
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
    DualWeights weights;
    weigh_dual_rows<Rows>(params, steps, row, digits, weights);
    for (int r = 0; !kProductsMixSigns && r < Rows; ++r) {
      corrections[r] = correction_of(digits + r * 128, tile.value_shift);
    }
    const ValueParams of_chunk = {.values = values,
                                  .prefetcher = params.prefetcher,
                                  .p = nullptr,
                                  .p_stride = 0,
                                  .num_rows = Rows,
                                  .sums = sums,
                                  .scratch = nullptr};
    add_all_parts<Rows, Fixed::kTwoDigits>(of_chunk, tile, 0, weights.units);
    for (int r = 0; r < Rows; ++r) {
      add_channels<Bits>(channels, head_dim, weights.sums[r], sums + r * head_dim,
                         params.sums + int64_t{row + r} * head_dim);
    }
  });
  params.prefetcher.rest();
  return true;
}

template <int Bits, Fixed OfQuery>
inline constexpr PackedKernels kDualKernels = {
    prepare_dual_queries<Bits>, score_dual<Bits, OfQuery>, add_dual_values<Bits>, kAnyRows};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
