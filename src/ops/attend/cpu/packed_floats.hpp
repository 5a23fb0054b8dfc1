// Attention over rows of 16-bit and 8-bit floats: they are widened in registers, and everything is
// binary32.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/lanes.hpp"
#include "ops/attend/cpu/packed_prefetch.hpp"
#include "ops/attend/cpu/packed_steps.hpp"
#include "ops/cpu/facts_in_kernels.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// ---- kLanes<Widest> numbers of a row; a number is this times kUnit.

template <class Target, class Source>
KVX_INLINE Target load_as(const void* source) {
  Source narrow;
  memcpy(&narrow, source, sizeof narrow);
  return __builtin_convertvector(narrow, Target);
}

KVX_INLINE Widest widen_f16(ShortLanes halves) {
#if defined(__AVX512F__)
  return static_cast<Widest>(_mm512_cvtph_ps(__builtin_bit_cast(__m256i, halves)));
#else
  return static_cast<Widest>(_mm256_cvtph_ps(__builtin_bit_cast(__m128i, halves)));
#endif
}

template <class Codec>
struct FloatLoader;

template <>
struct FloatLoader<format::BF16Codec> {
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static Widest load(const uint8_t* row, int number) {
    using Bits = LanesOf<Widest>::Bits;
    return __builtin_bit_cast(Widest, load_as<Bits, ShortLanes>(row + 2 * number) << 16);
  }
};
template <>
struct FloatLoader<format::F16Codec> {
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static Widest load(const uint8_t* row, int number) {
    ShortLanes halves;
    memcpy(&halves, row + 2 * number, sizeof halves);
    return widen_f16(halves);
  }
};
// E5M2 is the upper byte of an F16.
template <>
struct FloatLoader<format::E5M2Codec> {
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static Widest load(const uint8_t* row, int number) {
    return widen_f16(load_as<ShortLanes, ByteLanes>(row + number) << 8);
  }
};
// E4M3's exponent and mantissa in an F16's, whose bias is larger by 8. NaN becomes 480.
template <>
struct FloatLoader<format::E4M3Codec> {
  static constexpr float kUnit = 256.0f;
  static constexpr bool kHidesNan = true;
  KVX_INLINE static Widest load(const uint8_t* row, int number) {
    const ShortLanes codes = load_as<ShortLanes, ByteLanes>(row + number);
    return widen_f16(((codes & 0x80) << 8) | ((codes & 0x7F) << 7));
  }
};

// Whether a row of the tile has a code that says NaN.
template <class Codec>
KVX_INLINE bool has_hidden_nan(const PackedTile& tile) {
  if constexpr (!FloatLoader<Codec>::kHidesNan) return false;
  using Found = decltype(std::declval<ByteLanes>() == std::declval<ByteLanes>());
  Found found = {};
  for (int t = 0; t < tile.num_tokens; ++t) {
    for (int d = 0; d < tile.head_dim; d += static_cast<int>(sizeof(ByteLanes))) {
      ByteLanes codes;
      memcpy(&codes, tile.codes[t] + d, sizeof codes);
      found |= (codes & 0x7F) == 0x7F;
    }
  }
  constexpr Found kNone = {};
  return memcmp(&found, &kNone, sizeof found) != 0;
}

// Lane j of the result is the sum of rows[j].
template <int Step = 1, class V>
KVX_INLINE V sum_each(V* rows) {
  constexpr int kN = kLanes<V>;
  if constexpr (Step < kN) {
    for (int i = 0; i < kN; i += 2 * Step) {
      swap_lanes<Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, kN>());
      rows[i] += rows[i + Step];
    }
    return sum_each<Step * 2>(rows);
  } else {
    return rows[0];
  }
}

inline constexpr int kTokensAtOnceFloats = kLanes<Widest> == 16 ? 4 : 2;

// kLanes<Widest> tokens from `token` on.
template <class Codec, int Rows>
KVX_INLINE void score_float_rows(const ScoreJob& job, int row, int token, const float* steps,
                                 Prefetcher& prefetcher) {
  using Loader = FloatLoader<Codec>;
  constexpr int kN = kLanes<Widest>;
  constexpr int kTokens = kTokensAtOnceFloats;
  const int head_dim = job.keys.head_dim;
  Widest products[Rows][kN];
  for (int t = 0; t < kN; t += kTokens) {
    Widest sums[kTokens][Rows] = {};
    const uint8_t* const* codes = job.keys.codes + token + t;
    for (int d = 0; d < head_dim; d += kN) {
      Widest queries[Rows];
      for (int r = 0; r < Rows; ++r) {
        queries[r] = load<Widest>(job.queries + int64_t{row + r} * head_dim + d);
      }
      for (int i = 0; i < kTokens; ++i) {
        const Widest key = Loader::load(codes[i], d);
        for (int r = 0; r < Rows; ++r) sums[i][r] += key * queries[r];
      }
      prefetcher.next_line();
      prefetcher.next_line();
    }
    for (int i = 0; i < kTokens; ++i) {
      for (int r = 0; r < Rows; ++r) products[r][t + i] = sums[i][r];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    Widest scores = sum_each(products[r]);
    if (steps) scores *= load<Widest>(steps + token);
    store<Widest>(scores, job.scores + (row + r) * job.scores_stride + token);
  }
}

template <class Codec, int Rows>
static void score_float_chunk(const ScoreJob& job, int row, const float* steps,
                              Prefetcher& prefetcher) {
  for (int token = 0; token < job.keys.padded_tokens(); token += kLanes<Widest>) {
    score_float_rows<Codec, Rows>(job, row, token, steps, prefetcher);
  }
}

// The tile's steps, or null where the format has no scale.
template <class Format>
KVX_INLINE const float* load_float_steps(const PackedTile& tile, float* scratch) {
  if constexpr (is_plain<Format>()) {
    return nullptr;
  } else {
    load_steps(tile, scale_row(*tile.spec, tile.head_dim),
               FloatLoader<typename Format::Codec>::kUnit, scratch);
    return scratch;
  }
}

template <class Format>
bool score_floats(const ScoreJob& job) {
  using Codec = typename Format::Codec;
  if (has_hidden_nan<Codec>(job.keys)) return false;
  const float* steps = load_float_steps<Format>(job.keys, job.scratch);
  Prefetcher prefetcher(job.next);
  for_row_chunks(job.num_rows, [&]<int Rows>(int row) {
    score_float_chunk<Codec, Rows>(job, row, steps, prefetcher);
  });
  prefetcher.rest();
  return true;
}

// Vectors * kLanes<Widest> numbers from `number` on. weights: [Rows, kMaxTileTokens].
template <class Codec, int Rows, int Vectors>
KVX_INLINE void add_float_columns(const ValueJob& job, const float* weights, int row, int number,
                                  Prefetcher& prefetcher) {
  constexpr int kN = kLanes<Widest>;
  float* target = job.sums + int64_t{row} * job.values.head_dim + number;
  Widest sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      sums[r][v] = load<Widest>(target + int64_t{r} * job.values.head_dim + v * kN);
    }
  }
  for (int t = 0; t < job.values.num_tokens; ++t) {
    for (int v = 0; v < Vectors; ++v) {
      const Widest value = FloatLoader<Codec>::load(job.values.codes[t], number + v * kN);
      for (int r = 0; r < Rows; ++r) sums[r][v] += value * weights[r * kMaxTileTokens + t];
    }
    prefetcher.next_line();
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      store<Widest>(sums[r][v], target + int64_t{r} * job.values.head_dim + v * kN);
    }
  }
}

template <class Codec, int Rows>
static void add_float_chunk(const ValueJob& job, const float* steps, int row,
                            Prefetcher& prefetcher) {
  constexpr int kVectors = kLanes<Widest> == 16 ? 4 : 2;
  constexpr int kN = kLanes<Widest>;
  float weights[Rows * kMaxTileTokens];
  for (int r = 0; r < Rows; ++r) {
    const float* p = job.p + (row + r) * job.p_stride;
    for (int t = 0; t < job.values.num_tokens; ++t) {
      weights[r * kMaxTileTokens + t] = steps ? p[t] * steps[t] : p[t];
    }
  }
  int number = 0;
  for (; number + kVectors * kN <= job.values.head_dim; number += kVectors * kN) {
    add_float_columns<Codec, Rows, kVectors>(job, weights, row, number, prefetcher);
  }
  for (; number < job.values.head_dim; number += kN) {
    add_float_columns<Codec, Rows, 1>(job, weights, row, number, prefetcher);
  }
}

template <class Format>
bool add_float_values(const ValueJob& job) {
  using Codec = typename Format::Codec;
  if (has_hidden_nan<Codec>(job.values)) return false;
  const float* steps = load_float_steps<Format>(job.values, job.scratch);
  Prefetcher prefetcher(job.next);
  for_row_chunks(job.num_rows, [&]<int Rows>(int row) {
    add_float_chunk<Codec, Rows>(job, steps, row, prefetcher);
  });
  prefetcher.rest();
  return true;
}

// Queries are used as they are.
inline void prepare_no_queries(const format::FormatSpec&, int, const float*, int, float*) {}

template <class Format>
inline constexpr PackedKernels kFloatKernels = {prepare_no_queries, score_floats<Format>,
                                                add_float_values<Format>};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
