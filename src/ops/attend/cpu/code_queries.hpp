// Queries as digits that integer products with codes take.
#pragma once

#include "ops/attend/cpu/code_vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// prepared, for every kRowChunk rows, which take kRowChunk * head_dim floats:
//   [head_dim / 16][kRowChunk rows][high digits: int8 x 16][low digits: int8 x 16], or
//   [head_dim / 16][kRowChunk rows][words: int16 x 16]
//   [spans][kRowChunk rows][scale: f32][correction: int32]
//   [kRowChunk rows][sum of the row: f32]
// so that what a loop over a chunk reads lies at fixed distances from one address. With 16 bits
// number = (256 * high + low) * scale, or word * scale, and all spans of a row have one scale; with
// one digit, which leaves the low ones out, number = high * its span's scale. Digits lie in the
// order in which the key tile has its bytes, words in the order of its pairs. A correction undoes
// the keys' bias: -bias * sum of the span's fixed-point numbers.

// Most numbers that share an integer sum. 16 bits: what it can hold, 255 * 127 * 128 * 256 < 2^31.
// One digit: a smaller span has a smaller largest number and so a finer scale.
constexpr int most_in_span(Fixed form) {
  return form == Fixed::kHighDigit ? 32 : 128;
}

constexpr int bytes_of(Fixed form) {
  return form == Fixed::kHighDigit ? 1 : 2;
}

struct QueryLayout {
  QueryLayout(const format::FormatSpec& spec, int row_length, Fixed form)
      : head_dim(row_length),
        group(spec.group_size == format::kWholeRow ? head_dim : spec.group_size),
        span(group < most_in_span(form) ? group : most_in_span(form)),
        num_spans((head_dim + span - 1) / span),
        bytes_of_number(bytes_of(form)) {}

  // Of the row's first sixteen numbers; the next are digits_stride() bytes away.
  int8_t* digits(float* prepared, int row) const {
    return reinterpret_cast<int8_t*>(prepared + int64_t{row / kRowChunk} * kRowChunk * head_dim) +
           row % kRowChunk * 16 * bytes_of_number;
  }
  const int8_t* digits(const float* prepared, int row) const {
    return digits(const_cast<float*>(prepared), row);
  }
  int digits_stride() const { return kRowChunk * 16 * bytes_of_number; }
  int scales_at(int row) const {
    return row / kRowChunk * kRowChunk * head_dim + head_dim * bytes_of_number +
           row % kRowChunk * 2;
  }
  int sum_at(int row) const { return scales_at(row) - row % kRowChunk + 2 * kRowChunk * num_spans; }
  int end_of_span(int s) const { return (s + 1) * span < head_dim ? (s + 1) * span : head_dim; }

  int head_dim, group, span, num_spans, bytes_of_number;
};

KVX_INLINE int sum_of_ints(const Ints& lanes) {
  return fold(
      lanes, [](const auto& a, const auto& b) { return a + b; },
      std::make_integer_sequence<int, kIntLanes / 2>());
}

// The largest magnitude of numbers [first, end).
KVX_INLINE float largest_of(const float* query, int first, int end) {
  Widest magnitudes = {};
  for (int d = first; d < end; d += kIntLanes) {
    const Widest x = load<Widest>(query + d);
    const Widest magnitude = x < 0.0f ? -x : x;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  }
  return max_of_lanes(magnitudes);
}

// One span of a finite query.
template <class Codec, format::Packing P, Fixed F>
KVX_INLINE void prepare_span(const QueryLayout& layout, int row, int s, float largest,
                             const float* query, float* prepared) {
  constexpr float kMost = F == Fixed::kHighDigit ? 127 : 127 * 256;
  const int first = s * layout.span;
  const int end = layout.end_of_span(s);
  const float inverse = largest > 0x1p-100f ? kMost / largest : 0.0f;
  int8_t* digits = layout.digits(prepared, row);
  Ints sum = {};
  for (int d = first; d < end; d += kIntLanes) {
    const Ints fixed = to_nearest(load<Widest>(query + d) * inverse);
    sum += fixed;
    int8_t* chunk = digits + d / 16 * layout.digits_stride();
    if constexpr (F == Fixed::kHighDigit) {
      store_in_places<Codec, P>(fixed, chunk, d % 16);
    } else if constexpr (F == Fixed::kWord) {
      store_pairs(fixed, chunk + d % 16 * 2);
    } else {
      store_in_places<Codec, P>((fixed + 128) >> 8, chunk, d % 16);
      store_in_places<Codec, P>(fixed, chunk + 16, d % 16);  // the lowest byte is the rest
    }
  }
  const int correction = -CodeBytes<Codec>::kKeyBias * sum_of_ints(sum);
  float* scale = prepared + layout.scales_at(row) + 2 * kRowChunk * s;
  scale[0] = inverse > 0 ? largest / kMost : 0.0f;
  memcpy(scale + 1, &correction, sizeof correction);
}

KVX_INLINE bool is_number(float x) {
  return x - x == 0;
}

template <class Codec, format::Packing P, Fixed F>
void prepare_code_queries(const format::FormatSpec& spec, int head_dim, const float* queries,
                          int num_rows, float* prepared) {
  const QueryLayout layout(spec, head_dim, F);
  for (int row = 0; row < num_rows; ++row) {
    const float* query = queries + int64_t{row} * head_dim;
    Widest sums = {};
    for (int d = 0; d < head_dim; d += kIntLanes) sums += load<Widest>(query + d);
    const float sum = sum_of_lanes(sums);
    prepared[layout.sum_at(row)] = sum;
    if (!is_number(sum)) continue;  // digits cannot hold it, and score declines
    const float largest = largest_of(query, 0, head_dim);
    for (int s = 0; s < layout.num_spans; ++s) {
      const float of_span = F == Fixed::kHighDigit
                                ? largest_of(query, s * layout.span, layout.end_of_span(s))
                                : largest;
      prepare_span<Codec, P, F>(layout, row, s, of_span, query, prepared);
    }
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
