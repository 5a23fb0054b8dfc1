// Scores of integer codes: keys as a tile of bytes, and their products with queries as digits.
#pragma once

#include "ops/attend/cpu/code_queries.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// The key tile: [padded_tokens / kIntLanes][head_dim / 4][kIntLanes tokens x 4 numbers], bytes.

struct KeyTile {
  const uint8_t* codes;
  const float* steps;  // [groups, padded_tokens]
  const float* zeros;  // [padded_tokens], or null
};

// Sixteen numbers' products: keys of Vectors vectors of tokens, `distance` bytes apart.
template <int Rows, int Vectors>
KVX_INLINE void add_sixteen_words(const uint8_t* codes, int distance, const int8_t* words,
                                  Ints (*sums)[Vectors]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Pairs keys[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      keys[v] = widen_unsigned(load_bytes(codes + v * distance + i * 4 * kIntLanes));
    }
    for (int r = 0; r < Rows; ++r) {
      const Ints even = splat_word(words + r * 32 + i * 8);
      const Ints odd = splat_word(words + r * 32 + i * 8 + 4);
      for (int v = 0; v < Vectors; ++v) {
        sums[r][v] = add_pairs(add_pairs(sums[r][v], keys[v].even, even), keys[v].odd, odd);
      }
    }
  }
}

// The same with digits: the high ones' sums and the low ones'.
template <int Rows, int Vectors, Fixed F>
KVX_INLINE void add_sixteen(const uint8_t* codes, int distance, const int8_t* digits,
                            Ints (*high)[Vectors], Ints (*low)[Vectors]) {
  constexpr int kDigits = bytes_of(F);
  constexpr Operands kOf = Operands::kKeysAndQueries;
  const auto query = [&](int r, int digit, int i) {
    return splat_word(digits + (r * kDigits + digit) * 16 + i * 4);
  };
  if constexpr (kAddsFours) {
    for (int v = 0; v < Vectors; ++v) {
      Ints keys[4];
      for (int i = 0; i < 4; ++i) keys[i] = load_bytes(codes + v * distance + i * 4 * kIntLanes);
      for (int r = 0; r < Rows; ++r) {
        for (int digit = 0; digit < kDigits; ++digit) {
          Ints& sum = digit == 0 ? high[r][v] : low[r][v];
          sum = add_four_dots<kOf>(sum, keys, digits + (r * kDigits + digit) * 16);
        }
      }
    }
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Ints keys[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      keys[v] = load_bytes(codes + v * distance + i * 4 * kIntLanes);
    }
    for (int r = 0; r < Rows; ++r) {
      const Ints q_high = query(r, 0, i);
      for (int v = 0; v < Vectors; ++v) high[r][v] = add_dots<kOf>(high[r][v], keys[v], q_high);
      if constexpr (F == Fixed::kHighDigit) continue;
      const Ints q_low = query(r, 1, i);
      for (int v = 0; v < Vectors; ++v) low[r][v] = add_dots<kOf>(low[r][v], keys[v], q_low);
    }
  }
}

// Vectors vectors of tokens from `token` on for Rows queries. What the loops read is in local
// variables: behind a reference the compiler loads it again after every store.
template <int Rows, int Vectors, Fixed F>
KVX_INLINE void score_rows(const ScoreParams& params, const QueryLayout& layout, int row, int token,
                           const KeyTile& tile) {
  constexpr bool kOneDigit = F == Fixed::kHighDigit;
  const int n = params.keys.padded_tokens();
  const int head_dim = layout.head_dim;
  const int num_spans = layout.num_spans;
  const int spans_a_group = (layout.group + layout.span - 1) / layout.span;
  const uint8_t* codes = tile.codes + int64_t{token} * head_dim;
  const float* scales = params.prepared + layout.scales_at(row);
  const int8_t* digits = layout.digits(params.prepared, row);
  const float* steps = tile.steps + token;
  Widest scores[Rows][Vectors] = {};
  int place = 0;
  int spans_done = 0;  // of the group
  for (int s = 0; s < num_spans; ++s, scales += 2 * kRowChunk) {
    Ints high[Rows][Vectors];
    Ints low[Rows][Vectors];
    for (int r = 0; r < Rows; ++r) {
      const Ints correction = splat_word(scales + 2 * r + 1);
      for (int v = 0; v < Vectors; ++v) {
        high[r][v] = kOneDigit ? correction : Ints{};
        low[r][v] = correction;
      }
    }
    for (const int end = layout.end_of_span(s); place < end; place += 16) {
      params.prefetcher.step();
      if constexpr (F == Fixed::kWord) {
        add_sixteen_words<Rows, Vectors>(codes, head_dim * kIntLanes, digits, low);
      } else {
        add_sixteen<Rows, Vectors, F>(codes, head_dim * kIntLanes, digits, high, low);
      }
      codes += 16 * kIntLanes;
      digits += kRowChunk * 16 * bytes_of(F);
    }
    for (int v = 0; v < Vectors; ++v) {
      const Widest step = load<Widest>(steps + v * kIntLanes);
      for (int r = 0; r < Rows; ++r) {
        const Ints fixed = kOneDigit ? high[r][v] : join_digits(high[r][v], low[r][v]);
        scores[r][v] += to_floats(fixed) * (kOneDigit ? step * scales[2 * r] : step);
      }
    }
    if (++spans_done == spans_a_group) {
      spans_done = 0;
      steps += n;
    }
  }
  for (int r = 0; r < Rows; ++r) {
    const float scale = kOneDigit ? 1.0f : params.prepared[layout.scales_at(row + r)];
    float* at = params.scores + (row + r) * params.scores_stride + token;
    for (int v = 0; v < Vectors; ++v) store<Widest>(scores[r][v] * scale, at + v * kIntLanes);
  }
}

// The zeros of an affine tile, for one query.
KVX_INLINE void add_key_zeros(const ScoreParams& params, const QueryLayout& layout, int row,
                              const KeyTile& tile) {
  const float sum = params.prepared[layout.sum_at(row)];
  float* scores = params.scores + row * params.scores_stride;
  for (int t = 0; t < params.keys.padded_tokens(); t += kIntLanes) {
    store<Widest>(load<Widest>(scores + t) + load<Widest>(tile.zeros + t) * sum, scores + t);
  }
}

template <int Rows, Fixed F>
static void score_chunk(const ScoreParams& params, const QueryLayout& layout, int row,
                        const KeyTile& tile) {
  constexpr int kVectors = key_vectors_together(F);
  const int n = params.keys.padded_tokens();
  int token = 0;
  for (; token + kVectors * kIntLanes <= n; token += kVectors * kIntLanes) {
    score_rows<Rows, kVectors, F>(params, layout, row, token, tile);
  }
  for (; token < n; token += kIntLanes) score_rows<Rows, 1, F>(params, layout, row, token, tile);
  for (int r = 0; tile.zeros && r < Rows; ++r) add_key_zeros(params, layout, row + r, tile);
}

// A step that is NaN or infinite makes the score so, which is right.
template <class Codec, format::Packing P, Fixed F>
bool score_codes(const ScoreParams& params) {
  const PackedTile& keys = params.keys;
  const int n = keys.padded_tokens();
  const ScaleRow scales = scale_row(*keys.spec, keys.head_dim);
  const QueryLayout layout(*keys.spec, keys.head_dim, F);
  for (int row = 0; row < params.num_rows; ++row) {
    if (!is_number(params.prepared[layout.sum_at(row)])) return false;
  }
  float* steps = params.scratch;
  auto* codes = reinterpret_cast<uint8_t*>(steps + scales.count * n);
  load_steps(keys, scales, CodeBytes<Codec>::kUnit * tensor_scale_of(keys), steps);
  const int row_bytes = keys.head_dim * Codec::kBits / 8;
  params.prefetcher.pace(PhaseShares::kUnpackKeys, n / kIntLanes * unpack_key_steps(row_bytes));
  for (int token = 0; token < n; token += kIntLanes) {
    unpack_keys<Codec>(keys.codes + token, row_bytes, codes + int64_t{token} * keys.head_dim,
                       params.prefetcher);
  }
  if (keys.spec->is_affine()) {
    constexpr float kMiddle = CodeBytes<Codec>::kMiddle;
    for (int t = 0; t < n; ++t) steps[n + t] += kMiddle * steps[t];
  }
  const KeyTile tile = {codes, steps, keys.spec->is_affine() ? steps + n : nullptr};
  constexpr int kTokensAtOnce = key_vectors_together(F) * kIntLanes;
  const int steps_a_chunk = (n + kTokensAtOnce - 1) / kTokensAtOnce * (keys.head_dim / 16);
  params.prefetcher.pace(PhaseShares::kScore, steps_a_chunk * num_row_chunks(params.num_rows));
  for_row_chunks(params.num_rows,
                 [&]<int Rows>(int row) { score_chunk<Rows, F>(params, layout, row, tile); });
  return true;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
