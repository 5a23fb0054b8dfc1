// Scores of integer codes: queries as digits, keys as a tile of bytes, and their products.
#pragma once

#include "ops/attend/cpu/code_vectors.hpp"

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

// One span of a finite query.
template <class Codec, format::Packing P, int Digits>
KVX_INLINE void prepare_span(const QueryLayout& layout, int row, int s, const float* query,
                             float* prepared) {
  constexpr float kMost = Digits == 2 ? 127 * 256 : 127;
  const int first = s * layout.span;
  const int end = layout.end_of_span(s);
  Widest magnitudes = {};
  for (int d = first; d < end; d += kIntLanes) {
    const Widest x = load<Widest>(query + d);
    const Widest magnitude = x < 0.0f ? -x : x;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  }
  const float largest = max_of_lanes(magnitudes);
  const float inverse = largest > 0x1p-100f ? kMost / largest : 0.0f;
  int8_t* high_digits = layout.digits(prepared, row);
  int8_t* low_digits = high_digits + layout.head_dim;
  Ints sum = {};
  for (int d = first; d < end; d += kIntLanes) {
    const Ints fixed = to_nearest(load<Widest>(query + d) * inverse);
    sum += fixed;
    if constexpr (Digits == 1) {
      store_in_places<Codec, P>(fixed, high_digits + d);
      continue;
    }
    store_in_places<Codec, P>((fixed + 128) >> 8, high_digits + d);
    store_in_places<Codec, P>(fixed, low_digits + d);  // what is left is the lowest byte
  }
  int total = 0;
  for (int lane = 0; lane < kIntLanes; ++lane) total += sum[lane];
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
    Widest sums = {};
    for (int d = 0; d < head_dim; d += kIntLanes) sums += load<Widest>(query + d);
    const float sum = sum_of_lanes(sums);
    prepared[layout.sum_at(row)] = sum;
    if (!is_number(sum)) continue;  // digits cannot say it, and score goes the plain way
    for (int s = 0; s < layout.num_spans; ++s) {
      prepare_span<Codec, P, Digits>(layout, row, s, query, prepared);
    }
  }
}

// ---- Keys
//
// The key tile: [padded_tokens / kIntLanes][head_dim / 4][kIntLanes tokens x 4 numbers], bytes.

struct KeyTile {
  const uint8_t* codes;
  const float* steps;  // [groups, padded_tokens]
  const float* zeros;  // [padded_tokens], or null
};

// Vectors vectors of tokens from `token` on for Rows queries. What the loops read is in local
// variables: behind a reference the compiler loads it again after every store.
template <int Rows, int Vectors, int Digits>
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
  int spans_done = 0;  // of the group
  for (int s = 0; s < num_spans; ++s) {
    Ints high[Rows][Vectors];
    Ints low[Rows][Vectors];
    for (int r = 0; r < Rows; ++r) {
      const Ints correction = splat_word(scales + r * head_dim + num_spans + s);
      for (int v = 0; v < Vectors; ++v) {
        high[r][v] = Digits == 1 ? correction : Ints{};
        low[r][v] = correction;
      }
    }
    for (const int end = layout.end_of_span(s); place < end;) {
      job.prefetcher.step();
#pragma GCC unroll 4
      for (int four = 0; four < 4; ++four, place += 4) {
        Ints keys[Vectors];
        for (int v = 0; v < Vectors; ++v) {
          keys[v] = load_bytes(codes + (v * head_dim + place) * kIntLanes);
        }
        for (int r = 0; r < Rows; ++r) {
          const Ints q_high = splat_word(digits[r] + place);
          for (int v = 0; v < Vectors; ++v) high[r][v] = add_dots(high[r][v], keys[v], q_high);
          if constexpr (Digits == 1) continue;
          const Ints q_low = splat_word(digits[r] + head_dim + place);
          for (int v = 0; v < Vectors; ++v) low[r][v] = add_dots(low[r][v], keys[v], q_low);
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const float scale = scales[r * head_dim + s];
      for (int v = 0; v < Vectors; ++v) {
        const Ints fixed = Digits == 1 ? high[r][v] : join_digits(high[r][v], low[r][v]);
        const Widest weight = load<Widest>(steps + v * kIntLanes) * scale;
        float* at = scores[r] + v * kIntLanes;
        store<Widest>((s == 0 ? Widest{} : load<Widest>(at)) + to_floats(fixed) * weight, at);
      }
    }
    if (++spans_done == spans_a_group) {
      spans_done = 0;
      steps += n;
    }
  }
}

// The zeros of an affine tile, for one query.
KVX_INLINE void add_key_zeros(const ScoreJob& job, const QueryLayout& layout, int row,
                              const KeyTile& tile) {
  const float sum = job.prepared[layout.sum_at(row)];
  float* scores = job.scores + row * job.scores_stride;
  for (int t = 0; t < job.keys.padded_tokens(); t += kIntLanes) {
    store<Widest>(load<Widest>(scores + t) + load<Widest>(tile.zeros + t) * sum, scores + t);
  }
}

template <int Rows, int Digits>
static void score_chunk(const ScoreJob& job, const QueryLayout& layout, int row,
                        const KeyTile& tile) {
  constexpr int kVectors = key_vectors_together(Digits);
  const int n = job.keys.padded_tokens();
  int token = 0;
  for (; token + kVectors * kIntLanes <= n; token += kVectors * kIntLanes) {
    score_rows<Rows, kVectors, Digits>(job, layout, row, token, tile);
  }
  for (; token < n; token += kIntLanes) score_rows<Rows, 1, Digits>(job, layout, row, token, tile);
  for (int r = 0; tile.zeros && r < Rows; ++r) add_key_zeros(job, layout, row + r, tile);
}

// A step that is NaN or infinite makes the score so, which is right.
template <class Codec, format::Packing P, int Digits>
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
  job.prefetcher.pace(PhaseShares::kUnpackKeys, n / kIntLanes * unpack_key_steps<Codec>(row_bytes));
  for (int token = 0; token < n; token += kIntLanes) {
    unpack_keys<Codec, P>(keys.codes + token, row_bytes, codes + int64_t{token} * keys.head_dim,
                          job.prefetcher);
  }
  if (keys.spec->is_affine()) {
    constexpr float kMiddle = CodeBytes<Codec>::kKeyBias;
    for (int t = 0; t < n; ++t) steps[n + t] += kMiddle * steps[t];
  }
  const KeyTile tile = {codes, steps, keys.spec->is_affine() ? steps + n : nullptr};
  constexpr int kTokensAtOnce = key_vectors_together(Digits) * kIntLanes;
  const int steps_a_chunk = (n + kTokensAtOnce - 1) / kTokensAtOnce * (keys.head_dim / 16);
  job.prefetcher.pace(PhaseShares::kScore, steps_a_chunk * num_row_chunks(job.num_rows));
  for_row_chunks(job.num_rows,
                 [&]<int Rows>(int row) { score_chunk<Rows, Digits>(job, layout, row, tile); });
  return true;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
