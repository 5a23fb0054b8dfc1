// Weighted sums of integer codes: probabilities times steps as digits, values as a tile of bytes,
// and their products.
#pragma once

#include <bit>

#include "ops/attend/cpu/code_vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// What a pass over the value tile reads.
struct ValueTile {
  const int8_t* codes;
  // The tokens' steps relative to the largest of the group.
  const float* steps;     // of one group, [padded_tokens]
  const uint16_t* words;  // of several, [groups, kMaxTileTokens]
  const float* zeros;     // [padded_tokens], or null
  const float* largest;   // [groups]
  // [groups][kRowChunk rows][high and low][64 tokens in order of places], or words: [groups]
  // [kRowChunk rows][kPlaces][the pairs of four tokens].
  uint8_t* digits;
  int32_t* corrections;  // [groups][kRowChunk rows]; null where products mix signs
  int num_groups;
  int group_parts;  // parts of kIntLanes numbers in a group
  int value_bias;
  int value_shift;  // CodeBytes::kValueShift
};

// Of one row and group: what a sum of products has too much because values' bytes are shifted.
// Called where products do not mix signs.
KVX_INLINE int32_t correction_of(const uint8_t* digits, int value_shift) {
  int32_t high = 0;
  int32_t low = 0;
  for (int t = 0; t < kMaxTileTokens; ++t) {
    high += digits[t];
    low += digits[kMaxTileTokens + t];
  }
  return value_shift * (256 * high + low);
}

// The most corrections that a chunk of rows can need: one for each sixteen numbers of each row.
inline constexpr int kMostCorrections = kRowChunk * format::kMaxHeadDim / 16;

// ---- Weights: a row's probabilities times the tokens' steps

// Of a tile with fewer than 64 tokens what follows takes 64 all the same: the probabilities of
// those that it lacks are 0, and whatever is read as their steps weighs nothing.
inline constexpr int kTileVectors = kMaxTileTokens / kIntLanes;

// Sixty-four whole numbers, as two vectors of words or four, in an order that matters to
// packing to bytes alone.
inline constexpr int kWordVectors = kTileVectors / 2;

// The largest of n steps. What is no finite number or has a sign has larger bits than all others:
// one such among them is what is found.
KVX_INLINE float largest_step(const float* steps, int n) {
  using Bits = LanesOf<Widest>::Bits;
  Bits most = {};
  for (int t = 0; t < n; t += kIntLanes) {
    const Bits bits = __builtin_bit_cast(Bits, load<Widest>(steps + t));
    most = bits > most ? bits : most;
  }
  return std::bit_cast<float>(max_of_lanes(most));
}

// A group's steps times inverse as words, [kMaxTileTokens].
KVX_INLINE void steps_to_words(const float* steps, int n, float inverse, uint16_t* words) {
  Ints fixed[kTileVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; ++i) {
    const bool exists = i * kIntLanes < n;
    fixed[i] = exists ? to_nearest(load<Widest>(steps + i * kIntLanes) * inverse) : Ints{};
  }
#pragma GCC unroll 4
  for (int i = 0; i < kWordVectors; ++i) {
    store_words(pack_words(fixed[2 * i], fixed[2 * i + 1]), words + i * 2 * kIntLanes);
  }
}

// Divides each group's steps by their largest: of one group in place, of several as words, [groups,
// kMaxTileTokens]. False: a step is no finite number, or has a sign, or the group's largest is too
// small to divide by.
KVX_INLINE bool normalize_steps(float* steps, int num_groups, int n, float* largest,
                                uint16_t* words) {
  constexpr uint32_t kSmallest = std::bit_cast<uint32_t>(0x1p-100f);
  constexpr uint32_t kLargest = std::bit_cast<uint32_t>(0x1p100f);
  for (int g = 0; g < num_groups; ++g, steps += n) {
    largest[g] = largest_step(steps, n);
    const uint32_t bits = std::bit_cast<uint32_t>(largest[g]);
    if (bits >= kLargest || (bits < kSmallest && bits != 0)) return false;
    const float inverse = bits == 0 ? 0.0f : 1.0f / largest[g];
    if (num_groups > 1) {
      steps_to_words(steps, n, inverse * kMostStepWord, words + g * kMaxTileTokens);
      continue;
    }
    for (int t = 0; t < n; t += kIntLanes) {
      store<Widest>(load<Widest>(steps + t) * inverse, steps + t);
    }
  }
  return true;
}

KVX_INLINE void load_probabilities(const ValueParams& params, int row, Widest* p) {
  const float* source = params.p + row * params.p_stride;
  float padded[kMaxTileTokens];
  if (params.values.num_tokens < kMaxTileTokens) {
    memset(padded, 0, sizeof padded);
    memcpy(padded, source, params.values.num_tokens * sizeof(float));
    source = padded;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; ++i) p[i] = load<Widest>(source + i * kIntLanes);
}

KVX_INLINE float most_of(const Widest* weights) {
  Widest largest = weights[0];
#pragma GCC unroll 8
  for (int i = 1; i < kTileVectors; ++i) {
    largest = weights[i] > largest ? weights[i] : largest;
  }
  return max_of_lanes(largest);
}

// As whole numbers of 1 / inverse.
KVX_INLINE void weights_to_words(const Widest* weights, float inverse, Words* words) {
#pragma GCC unroll 4
  for (int i = 0; i < kWordVectors; ++i) {
    words[i] =
        pack_words(to_nearest(weights[2 * i] * inverse), to_nearest(weights[2 * i + 1] * inverse));
  }
}

// Two vectors of weights of a row's digits or words, of tokens from `token` on.
template <Fixed F>
KVX_INLINE void store_weights(Words a, Words b, int token, uint8_t* digits) {
  if constexpr (F == Fixed::kWord) {
    store_weight_pairs(words_to_signed(a), words_to_signed(b), digits + 2 * token);
  } else {
    store_digits(a, b, digits + token, digits + 64 + token);
  }
}

// One row's weights, for every group, as ValueTile's digits. Returns what its integer sums are to
// be multiplied with. With one group a weight is rounded once; with several, where that would take
// a product of floats each, a probability and a step are rounded first.
template <Fixed F>
KVX_INLINE float weigh_row(const ValueParams& params, const ValueTile& tile, int row,
                           uint8_t* digits) {
  constexpr float kNegligible = 0x1p-80f;  // beside the probability of 1 that some tile had
  constexpr int kVectorWords = 2 * kIntLanes;
  Widest p[kTileVectors];
  load_probabilities(params, row, p);
  if (tile.num_groups == 1) {
    const int n = params.values.padded_tokens();
#pragma GCC unroll 8
    for (int i = 0; i < kTileVectors; ++i) {
      if (i * kIntLanes < n) p[i] *= load<Widest>(tile.steps + i * kIntLanes);
    }
  }
  const float most = most_of(p);
  const bool counts = most > kNegligible;
  Words words[kWordVectors];
  weights_to_words(p, counts ? kMostWord / most : 0.0f, words);
  if (tile.num_groups == 1) {
    for (int i = 0; i < kWordVectors; i += 2) {
      store_weights<F>(words[i], words[i + 1], i * kVectorWords, digits);
    }
    return counts ? most / kMostWord : 0.0f;
  }
#pragma GCC unroll 4
  for (int i = 0; i < kWordVectors; ++i) words[i] = words_to_signed(words[i]);
  const uint16_t* steps = tile.words;
  for (int g = 0; g < tile.num_groups; ++g, steps += kMaxTileTokens, digits += kRowChunk * 128) {
    for (int i = 0; i < kWordVectors; i += 2) {
      const int at = i * kVectorWords;
      const Words a = multiply_words(words[i], load_words(steps + at));
      const Words b = multiply_words(words[i + 1], load_words(steps + at + kVectorWords));
      store_weights<F>(a, b, at, digits);
    }
  }
  // A product of words counts in units of 1 / 32768.
  return counts ? most / kMostWord * (32768.0f / kMostStepWord) : 0.0f;
}

// All of a row's numbers get sum over tokens of p * (zero - bias * step).
KVX_INLINE void add_value_zeros(const ValueParams& params, const ValueTile& tile, int row) {
  const float bias = static_cast<float>(tile.value_bias) * tile.largest[0];
  Widest p[kTileVectors];
  load_probabilities(params, row, p);
  Widest products = {};
  for (int t = 0; t < params.values.padded_tokens(); t += kIntLanes) {
    const Widest zero = load<Widest>(tile.zeros + t) - load<Widest>(tile.steps + t) * bias;
    products += p[t / kIntLanes] * zero;
  }
  const float sum = sum_of_lanes(products);
  float* sums = params.sums + int64_t{row} * params.values.head_dim;
  for (int d = 0; d < params.values.head_dim; d += kIntLanes) {
    store<Widest>(load<Widest>(sums + d) + sum, sums + d);
  }
}

// ---- Products

// Four places' products, from `first` on. digits: of each part.
template <int Rows, int Parts>
KVX_INLINE void add_places(const int8_t* codes, const uint8_t* const* digits, int first,
                           Ints (*high)[Parts], Ints (*low)[Parts]) {
  for (int i = 0; i < Parts; ++i) {
    Ints values[4];
    for (int j = 0; j < 4; ++j) values[j] = load_bytes(codes + i * kPartBytes + j * kPlaceBytes);
    for (int r = 0; r < Rows; ++r) {
      const uint8_t* of_row = digits[i] + r * 128 + 4 * first;
      high[r][i] = add_four_dots<Operands::kWeightsAndValues>(high[r][i], values, of_row);
      low[r][i] = add_four_dots<Operands::kWeightsAndValues>(low[r][i], values, of_row + 64);
    }
  }
}

// Four places' products of words, which are the weights less 32768. totals: the values' sums, of at
// most 2 * kPlaces bytes a word, which add_word_middles multiplies with what the weights lack.
template <int Rows, int Parts>
KVX_INLINE void add_word_places(const int8_t* codes, const uint8_t* const* words, int first,
                                Ints (*sums)[Parts], Ints* totals) {
  for (int i = 0; i < Parts; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Pairs values = widen_signed(load_bytes(codes + i * kPartBytes + j * kPlaceBytes));
      totals[i] = add_words(totals[i], add_words(values.even, values.odd));
      for (int r = 0; r < Rows; ++r) {
        const uint8_t* weights = words[i] + r * 128 + 8 * (first + j);
        sums[r][i] = add_pairs(sums[r][i], values.even, splat_word(weights));
        sums[r][i] = add_pairs(sums[r][i], values.odd, splat_word(weights + 4));
      }
    }
  }
}

// Parts parts of kIntLanes numbers from `part` on, for Rows rows. OneGroup: they share their steps,
// so their weights are loaded once. Tokens that the tile lacks weigh nothing, whatever their bytes
// are.
template <int Rows, int Parts, bool OneGroup, Fixed F>
KVX_INLINE void add_parts(const ValueParams& params, const ValueTile& tile, int row, int part,
                          const float* weights) {
  constexpr Operands kOf = Operands::kWeightsAndValues;
  Ints high[Rows][Parts] = {};
  Ints low[Rows][Parts] = {};
  Ints totals[Parts] = {};  // of words
  int group[Parts];
  float largest[Parts];
  for (int i = 0; i < Parts; ++i) {
    group[i] = (part + i) / tile.group_parts;
    largest[i] = tile.largest[group[i]];
  }
  const int head_dim = params.values.head_dim;
  float* sums = params.sums + int64_t{row} * head_dim + part * kIntLanes;
  const int8_t* codes = tile.codes + int64_t{part} * kPartBytes;
  const uint8_t* digits[Parts];
  for (int i = 0; i < Parts; ++i) digits[i] = tile.digits + group[i] * kRowChunk * 128;
  for (int first = 0; first < kPlaces; first += 4) {
    params.prefetcher.step();
    if constexpr (F == Fixed::kWord) {
      add_word_places<Rows, Parts>(codes + first * kPlaceBytes, digits, first, low, totals);
      continue;
    } else if constexpr (kAddsFours) {
      add_places<Rows, Parts>(codes + first * kPlaceBytes, digits, first, high, low);
      continue;
    }
#pragma GCC unroll 4
    for (int next = 0; next < 4; ++next) {
      const int place = first + next;
      Ints values[Parts];
      for (int i = 0; i < Parts; ++i) {
        values[i] = load_bytes(codes + i * kPartBytes + place * kPlaceBytes);
      }
      for (int r = 0; r < Rows; ++r) {
        Ints weight = splat_word(digits[0] + r * 128 + 4 * place);
        for (int i = 0; i < Parts; ++i) {
          if (!OneGroup && i > 0) weight = splat_word(digits[i] + r * 128 + 4 * place);
          high[r][i] = add_dots<kOf>(high[r][i], weight, values[i]);
        }
        weight = splat_word(digits[0] + r * 128 + 64 + 4 * place);
        for (int i = 0; i < Parts; ++i) {
          if (!OneGroup && i > 0) weight = splat_word(digits[i] + r * 128 + 64 + 4 * place);
          low[r][i] = add_dots<kOf>(low[r][i], weight, values[i]);
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r, sums += head_dim) {
    for (int i = 0; i < Parts; ++i) {
      if constexpr (F == Fixed::kWord) low[r][i] = add_word_middles(low[r][i], totals[i]);
      Ints fixed = join_digits(high[r][i], low[r][i]);
      if constexpr (!kProductsMixSigns) fixed -= tile.corrections[group[i] * kRowChunk + r];
      const Widest sum = to_floats(fixed);
      float* at = sums + i * kIntLanes;
      store<Widest>(load<Widest>(at) + sum * (weights[r] * largest[i]), at);
    }
  }
}

// weights: of each row, what its integer sums are to be multiplied with.
template <int Rows, Fixed F>
KVX_INLINE void add_all_parts(const ValueParams& params, const ValueTile& tile, int row,
                              const float* weights) {
  const int num_parts = params.values.head_dim / kIntLanes;
  const bool share_steps = tile.num_groups == 1 || tile.group_parts % kPartsTogether == 0;
  int part = 0;
  for (; part + kPartsTogether <= num_parts; part += kPartsTogether) {
    share_steps ? add_parts<Rows, kPartsTogether, true, F>(params, tile, row, part, weights)
                : add_parts<Rows, kPartsTogether, false, F>(params, tile, row, part, weights);
  }
  for (; part < num_parts; ++part) {
    add_parts<Rows, 1, true, F>(params, tile, row, part, weights);
  }
}

template <int Rows, Fixed F>
static void add_chunk(const ValueParams& params, const ValueTile& tile, int row) {
  float weights[Rows];
  for (int r = 0; r < Rows; ++r) {
    if (tile.zeros) add_value_zeros(params, tile, row + r);
    weights[r] = weigh_row<F>(params, tile, row + r, tile.digits + r * 128);
    for (int g = 0; !kProductsMixSigns && g < tile.num_groups; ++g) {
      const int at = g * kRowChunk + r;
      tile.corrections[at] = correction_of(tile.digits + at * 128, tile.value_shift);
    }
  }
  add_all_parts<Rows, F>(params, tile, row, weights);
}

template <class Codec, format::Packing P, Fixed F>
bool add_code_values(const ValueParams& params) {
  const PackedTile& values = params.values;
  const int n = values.padded_tokens();
  const bool is_affine = values.spec->is_affine();
  const ScaleRow scales = scale_row(*values.spec, values.head_dim);
  const int num_groups = is_affine ? 1 : scales.count;
  float* steps = params.scratch;
  float* largest = steps + scales.count * n;
  load_steps(values, scales, value_unit<Codec>() * tensor_scale_of(values), steps);
  for (int t = 0; is_affine && t < n; ++t) steps[n + t] *= 1 / value_unit<Codec>();
  // Digits and codes lie on whole lines: a vector across two of them costs twice.
  auto* words = reinterpret_cast<uint16_t*>(largest + (num_groups + 15) / 16 * 16);
  if (!normalize_steps(steps, num_groups, n, largest, words)) return false;
  auto* digits = reinterpret_cast<uint8_t*>(words + num_groups * kMaxTileTokens);
  auto* codes = reinterpret_cast<int8_t*>(digits + kRowChunk * num_groups * 128);
  unpack_values<Codec, P>(values, codes, params.prefetcher);
  int32_t corrections[kMostCorrections];
  const int group =
      values.spec->group_size == format::kWholeRow ? values.head_dim : values.spec->group_size;
  const ValueTile tile = {.codes = codes,
                          .steps = steps,
                          .words = words,
                          .zeros = is_affine ? steps + n : nullptr,
                          .largest = largest,
                          .digits = digits,
                          .corrections = kProductsMixSigns ? nullptr : corrections,
                          .num_groups = num_groups,
                          .group_parts = group / kIntLanes,
                          .value_bias = value_bias<Codec>(),
                          .value_shift = CodeBytes<Codec>::kValueShift};
  const int steps_a_chunk =
      (values.head_dim / kIntLanes + kPartsTogether - 1) / kPartsTogether * (kPlaces / 4);
  params.prefetcher.pace(PhaseShares::kAddValues, steps_a_chunk * num_row_chunks(params.num_rows));
  for_row_chunks(params.num_rows,
                 [&]<int Rows>(int row) { add_chunk<Rows, F>(params, tile, row); });
  params.prefetcher.rest();
  return true;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
