// Scores of integer codes: queries as digits, keys as a tile of bytes, and their products.
#pragma once

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// ---- Queries
//
// prepared, a row: [high digits: int8 x head_dim][low digits: int8 x head_dim]
//                  [scales: f32 x spans][corrections: int32 x spans][sum of the row: f32]
// number = (256 * high + low) * its span's scale, or high * scale with one digit. Digits lie in the
// order in which the key tile has its bytes. A correction undoes the keys' bias: -bias * sum of the
// span's fixed-point numbers.

// Most numbers that share a query's scale. Two digits: what one integer sum takes, 255 * 127 * 128
// * 256 < 2^31. One digit: a smaller span has a smaller largest number.
constexpr int most_in_span(int num_digits) {
  return num_digits == 2 ? 128 : 32;
}

struct QueryLayout {
  QueryLayout(const format::FormatSpec& spec, int row_length, int num_digits)
      : head_dim(row_length),
        group(spec.group_size == format::kWholeRow ? head_dim : spec.group_size),
        span(group < most_in_span(num_digits) ? group : most_in_span(num_digits)),
        num_spans((head_dim + span - 1) / span) {}

  int8_t* digits(float* prepared, int row) const {
    return reinterpret_cast<int8_t*>(prepared + int64_t{row} * head_dim);
  }
  const int8_t* digits(const float* prepared, int row) const {
    return reinterpret_cast<const int8_t*>(prepared + int64_t{row} * head_dim);
  }
  int scales_at(int row) const { return row * head_dim + head_dim / 2; }
  int corrections_at(int row) const { return scales_at(row) + num_spans; }
  int sum_at(int row) const { return corrections_at(row) + num_spans; }
  int end_of_span(int s) const { return (s + 1) * span < head_dim ? (s + 1) * span : head_dim; }

  int head_dim, group, span, num_spans;
};

// Which number of the row stands at a place of the key tile.
template <class Codec, format::Packing P>
constexpr int number_at(int place) {
  if (!CodeBytes<Codec>::kIsNibble) return place;
  const int byte = place / 8 * 4 + place % 4;
  return place % 8 < 4 ? low_nibble_number<P>(byte) : high_nibble_number<P>(byte);
}

template <class Codec, format::Packing P>
constexpr Table<int8_t, 16> order_of_places() {
  Table<int8_t, 16> order = {};
  for (int place = 0; place < 16; ++place) {
    order.at[place] = static_cast<int8_t>(number_at<Codec, P>(place));
  }
  return order;
}

// The lowest bytes of sixteen numbers of a row, in the order of places.
template <class Codec, format::Packing P>
KVX_INLINE void store_in_places(__m512i numbers, int8_t* digits) {
  static constexpr Table<int8_t, 16> kOrder = order_of_places<Codec, P>();
  const __m128i bytes = _mm_shuffle_epi8(
      _mm512_cvtepi32_epi8(numbers), _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder.at)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(digits), bytes);
}

// One span of a finite query.
template <class Codec, format::Packing P, int Digits>
KVX_INLINE void prepare_span(const QueryLayout& layout, int row, int s, const float* query,
                             float* prepared) {
  constexpr float kMost = Digits == 2 ? 127 * 256 : 127;
  const int first = s * layout.span;
  const int end = layout.end_of_span(s);
  __m512 magnitudes = _mm512_setzero_ps();
  for (int d = first; d < end; d += 16) {
    magnitudes = _mm512_max_ps(magnitudes, _mm512_abs_ps(_mm512_loadu_ps(query + d)));
  }
  const float largest = _mm512_reduce_max_ps(magnitudes);
  const float inverse = largest > 0x1p-100f ? kMost / largest : 0.0f;
  int8_t* high_digits = layout.digits(prepared, row);
  int8_t* low_digits = high_digits + layout.head_dim;
  __m512i sum = _mm512_setzero_si512();
  for (int d = first; d < end; d += 16) {
    const __m512i fixed =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(query + d), _mm512_set1_ps(inverse)));
    sum = _mm512_add_epi32(sum, fixed);
    if constexpr (Digits == 1) {
      store_in_places<Codec, P>(fixed, high_digits + d);
      continue;
    }
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_set1_epi32(128)), 8);
    store_in_places<Codec, P>(high, high_digits + d);
    store_in_places<Codec, P>(fixed, low_digits + d);  // what is left is the lowest byte
  }
  const int total = _mm512_reduce_add_epi32(sum);
  prepared[layout.scales_at(row) + s] = inverse > 0 ? largest / kMost : 0.0f;
  const int correction = -CodeBytes<Codec>::kKeyBias * total;
  memcpy(prepared + layout.corrections_at(row) + s, &correction, sizeof correction);
}

KVX_INLINE bool is_number(float x) {
  return x - x == 0;
}

template <class Codec, format::Packing P, int Digits>
void prepare_code_queries(const format::FormatSpec& spec, int head_dim, const float* queries,
                          int num_rows, float* prepared) {
  const QueryLayout layout(spec, head_dim, Digits);
  for (int row = 0; row < num_rows; ++row) {
    const float* query = queries + int64_t{row} * head_dim;
    __m512 sums = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += 16) sums = _mm512_add_ps(sums, _mm512_loadu_ps(query + d));
    const float sum = _mm512_reduce_add_ps(sums);
    prepared[layout.sum_at(row)] = sum;
    if (!is_number(sum)) continue;  // digits cannot say it, and score goes the plain way
    for (int s = 0; s < layout.num_spans; ++s) {
      prepare_span<Codec, P, Digits>(layout, row, s, query, prepared);
    }
  }
}

// ---- Keys
//
// The key tile: [padded_tokens / 16][head_dim / 4][16 tokens x 4 numbers], bytes.

struct KeyTile {
  const uint8_t* codes;
  const float* steps;  // [groups, padded_tokens]
  const float* zeros;  // [padded_tokens], or null
};

// Sixteen tokens. rows: [16].
template <class Codec>
KVX_INLINE void unpack_keys(const uint8_t* const* rows, int row_bytes, uint8_t* tile,
                            Prefetcher& prefetcher) {
  using Code = CodeBytes<Codec>;
  const __m512i table =
      Code::kIsNibble ? Code::template nibble_table<Code::kKeyOffset>() : __m512i{};
  const __m512i low_four = _mm512_set1_epi8(15);
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(Code::kKeyFlip));
  for (int offset = 0; offset < row_bytes; offset += 16) {
    prefetcher.step();
    __m512i r[4];  // r[i], lane l: token 4 l + i
    for (int i = 0; i < 4; ++i) r[i] = load_chunks(rows + i, 4, row_bytes, offset);
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]);
    const __m512i b = _mm512_unpacklo_epi32(r[2], r[3]);
    const __m512i c = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i d = _mm512_unpackhi_epi32(r[2], r[3]);
    const __m512i words[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b),
                              _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)};
    const int num_words = row_bytes - offset >= 16 ? 4 : 2;
    for (int w = 0; w < num_words; ++w) {
      if constexpr (Code::kIsNibble) {
        const __m512i low = _mm512_and_si512(words[w], low_four);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(words[w], 4), low_four);
        _mm512_storeu_si512(tile, _mm512_shuffle_epi8(table, low));
        _mm512_storeu_si512(tile + 64, _mm512_shuffle_epi8(table, high));
        tile += 128;
      } else {
        _mm512_storeu_si512(tile, _mm512_xor_si512(words[w], flip));
        tile += 64;
      }
    }
  }
}

// Tokens [token, token + Groups * 16) for Rows queries. What the loops read is in local variables:
// behind a reference the compiler loads it again after every store.
template <int Rows, int Groups, int Digits>
KVX_INLINE void score_rows(const ScoreJob& job, const QueryLayout& layout, int row, int token,
                           const KeyTile& tile) {
  const int n = job.keys.padded_tokens();
  const int head_dim = layout.head_dim;
  const int num_spans = layout.num_spans;
  const int spans_a_group = (layout.group + layout.span - 1) / layout.span;
  const uint8_t* codes = tile.codes + int64_t{token} * head_dim;
  const float* scales = job.prepared + layout.scales_at(row);
  const int8_t* digits[Rows];
  float* scores[Rows];
  for (int r = 0; r < Rows; ++r) {
    digits[r] = layout.digits(job.prepared, row + r);
    scores[r] = job.scores + (row + r) * job.scores_stride + token;
  }
  const float* steps = tile.steps + token;
  int place = 0;
  for (int s = 0; s < num_spans; ++s) {
    __m512i high[Rows][Groups];
    __m512i low[Rows][Groups];
    for (int r = 0; r < Rows; ++r) {
      const __m512i correction = splat_digits(scales + r * head_dim + num_spans + s);
      for (int g = 0; g < Groups; ++g) {
        high[r][g] = Digits == 1 ? correction : _mm512_setzero_si512();
        low[r][g] = correction;
      }
    }
    for (const int end = layout.end_of_span(s); place < end;) {
      job.prefetcher.step();
#pragma GCC unroll 4
      for (int four = 0; four < 4; ++four, place += 4) {
        __m512i keys[Groups];
        for (int g = 0; g < Groups; ++g) {
          keys[g] = _mm512_loadu_si512(codes + g * 16 * head_dim + place * 16);
        }
        for (int r = 0; r < Rows; ++r) {
          const __m512i q_high = splat_digits(digits[r] + place);
          for (int g = 0; g < Groups; ++g) {
            high[r][g] = _mm512_dpbusd_epi32(high[r][g], keys[g], q_high);
          }
          if constexpr (Digits == 1) continue;
          const __m512i q_low = splat_digits(digits[r] + head_dim + place);
          for (int g = 0; g < Groups; ++g) {
            low[r][g] = _mm512_dpbusd_epi32(low[r][g], keys[g], q_low);
          }
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const __m512 scale = _mm512_set1_ps(scales[r * head_dim + s]);
      for (int g = 0; g < Groups; ++g) {
        const __m512i fixed = Digits == 1 ? high[r][g] : join_digits(high[r][g], low[r][g]);
        const __m512 sum = _mm512_cvtepi32_ps(fixed);
        const __m512 weight = _mm512_mul_ps(_mm512_loadu_ps(steps + 16 * g), scale);
        const __m512 before = s == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(scores[r] + 16 * g);
        _mm512_storeu_ps(scores[r] + 16 * g, _mm512_fmadd_ps(sum, weight, before));
      }
    }
    if ((s + 1) % spans_a_group == 0) steps += n;
  }
}

// The zeros of an affine tile, for one query.
KVX_INLINE void add_key_zeros(const ScoreJob& job, const QueryLayout& layout, int row,
                              const KeyTile& tile) {
  const __m512 sum = _mm512_set1_ps(job.prepared[layout.sum_at(row)]);
  float* scores = job.scores + row * job.scores_stride;
  for (int t = 0; t < job.keys.padded_tokens(); t += 16) {
    const __m512 before = _mm512_loadu_ps(scores + t);
    _mm512_storeu_ps(scores + t, _mm512_fmadd_ps(_mm512_loadu_ps(tile.zeros + t), sum, before));
  }
}

template <int Rows, int Digits>
static void score_chunk(const ScoreJob& job, const QueryLayout& layout, int row,
                        const KeyTile& tile) {
  constexpr int kGroups = Digits == 1 ? 4 : 2;  // of sixteen tokens, as many as registers hold
  const int n = job.keys.padded_tokens();
  int token = 0;
  for (; token + 16 * kGroups <= n; token += 16 * kGroups) {
    score_rows<Rows, kGroups, Digits>(job, layout, row, token, tile);
  }
  for (; token < n; token += 16) score_rows<Rows, 1, Digits>(job, layout, row, token, tile);
  for (int r = 0; tile.zeros && r < Rows; ++r) add_key_zeros(job, layout, row + r, tile);
}

// A step that is NaN or infinite makes the score so, which is right.
template <class Codec, int Digits>
bool score_codes(const ScoreJob& job) {
  const PackedTile& keys = job.keys;
  const int n = keys.padded_tokens();
  const ScaleRow scales = scale_row(*keys.spec, keys.head_dim);
  const QueryLayout layout(*keys.spec, keys.head_dim, Digits);
  for (int row = 0; row < job.num_rows; ++row) {
    if (!is_number(job.prepared[layout.sum_at(row)])) return false;
  }
  float* steps = job.scratch;
  auto* codes = reinterpret_cast<uint8_t*>(steps + scales.count * n);
  load_steps(keys, scales, CodeBytes<Codec>::kUnit * tensor_scale_of(keys), steps);
  const int row_bytes = keys.head_dim * Codec::kBits / 8;
  job.prefetcher.pace(PhaseShares::kUnpackKeys, n / 16 * ((row_bytes + 15) / 16));
  for (int token = 0; token < n; token += 16) {
    unpack_keys<Codec>(keys.codes + token, row_bytes, codes + int64_t{token} * keys.head_dim,
                       job.prefetcher);
  }
  if (keys.spec->is_affine()) {
    constexpr float kMiddle = CodeBytes<Codec>::kKeyBias;
    for (int t = 0; t < n; ++t) steps[n + t] += kMiddle * steps[t];
  }
  const KeyTile tile = {codes, steps, keys.spec->is_affine() ? steps + n : nullptr};
  const int tokens_together = Digits == 1 ? 64 : 32;
  const int steps_a_chunk = (n + tokens_together - 1) / tokens_together * (keys.head_dim / 16);
  job.prefetcher.pace(PhaseShares::kScore, steps_a_chunk * num_row_chunks(job.num_rows));
  for_row_chunks(job.num_rows,
                 [&]<int Rows>(int row) { score_chunk<Rows, Digits>(job, layout, row, tile); });
  return true;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
