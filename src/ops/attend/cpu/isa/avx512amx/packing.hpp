// Rows of floats into the operands of AMX's products: a left one keeps its rows, a right one is cut
// into tiles of 32 x 16 numbers (1 KiB), of which two consecutive rows lie number beside number.
#pragma once

#include "format/list.hpp"
#include "format/traits.hpp"
#include "ops/attend/cpu/isa/avx512amx/row_parts.hpp"
#include "ops/attend/cpu/matrix/kernels.hpp"
#include "ops/attend/cpu/prefetcher.hpp"
#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

inline constexpr int kTileNumbers = kMatrixInner * kMatrixRows;
inline constexpr int kTokenColumns = kMaxTileTokens / kMatrixRows;

static bool split_rows(const float* rows, int num_rows, int n, float* parts) {
  PartsWatch watch;
  for (int r = 0; r < num_rows; ++r) {
    const float* row = rows + int64_t{r} * n;
    auto* high = reinterpret_cast<uint16_t*>(parts + int64_t{r} * n);
    for (int i = 0; i < n; i += kMatrixInner) {
      const __m512 first = _mm512_loadu_ps(row + i);
      const __m512 second = _mm512_loadu_ps(row + i + 16);
      const Parts both = parts_of(first, second);
      watch.see(first, second);
      _mm512_storeu_si512(high + i, both.high);
      _mm512_storeu_si512(high + n + i, both.low);
    }
  }
  return watch.all_have_parts();
}

// p: of a row's kMaxTileTokens.
KVX_INLINE void store_probability_parts(const __m512* p, float* row) {
  auto* high = reinterpret_cast<uint16_t*>(row);
  for (int v = 0; v < kMaxTileTokens / 16; v += 2) {
    const Parts both = parts_of(p[v], p[v + 1]);
    _mm512_storeu_si512(high + 16 * v, both.high);
    _mm512_storeu_si512(high + kMaxTileTokens + 16 * v, both.low);
  }
}

static void split_probabilities(float* rows, int num_rows, int n) {
  constexpr int kVectors = kMaxTileTokens / 16;
  __mmask16 masks[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int left = n - 16 * v;
    const int lanes = left < 0 ? 0 : left < 16 ? left : 16;
    masks[v] = static_cast<__mmask16>((1u << lanes) - 1);
  }
  for (int r = 0; r < num_rows; ++r) {
    float* row = rows + r * kMaxTileTokens;
    __m512 p[kVectors];
    for (int v = 0; v < kVectors; ++v) p[v] = _mm512_maskz_loadu_ps(masks[v], row + 16 * v);
    store_probability_parts(p, row);
  }
}

inline void clear_rows_from(int first, int head_dim, float* rows) {
  for (int i = first * head_dim; i < kTokenStep * head_dim; i += 16) {
    _mm512_storeu_ps(rows + i, _mm512_setzero_ps());
  }
}

// [pair of numbers][token]: a transposition of pairs.
KVX_INLINE void store_transposed(__m512i* tokens, uint16_t* tile) {
  Lanes16 lanes[kTokenStep];
  for (int t = 0; t < kTokenStep; ++t) lanes[t] = __builtin_bit_cast(Lanes16, tokens[t]);
  transpose_steps<1>(lanes);
  for (int i = 0; i < kTokenStep; ++i) {
    _mm512_storeu_si512(tile + i * kMatrixInner, __builtin_bit_cast(__m512i, lanes[i]));
  }
}

// Words i and i + 1 of a vector are numbers `first` + i / 2 of two rows.
constexpr Table<uint16_t, 32> order_of_pairs(int first) {
  Table<uint16_t, 32> order = {};
  for (int i = 0; i < 32; ++i) order.at[i] = static_cast<uint16_t>(first + i / 2 + i % 2 * 32);
  return order;
}

// Low parts are stored from the first tile that has some: until then, all of them are 0.
KVX_INLINE void expect_low_parts(MatrixTile& tile) {
  if (!tile.is_exact) return;
  tile.is_exact = false;
  for (int i = 0; i < kMaxTileTokens * tile.head_dim; i += kMatrixInner) {
    _mm512_storeu_si512(tile.low + i, _mm512_setzero_si512());
  }
}

static bool pack_keys(float* rows, int first, int num_tokens, MatrixTile& tile) {
  clear_rows_from(num_tokens, tile.head_dim, rows);
  PartsWatch watch;
  for (int d = 0; d < tile.head_dim; d += kMatrixInner) {
    __m512i high[kTokenStep];
    __m512i low[kTokenStep];
    for (int t = 0; t < kTokenStep; ++t) {
      const float* row = rows + t * tile.head_dim + d;
      const __m512 from = _mm512_loadu_ps(row);
      const __m512 behind = _mm512_loadu_ps(row + 16);
      const Parts both = parts_of(from, behind);
      watch.see(from, behind);
      watch.see_low(both.low);
      high[t] = both.high;
      low[t] = both.low;
    }
    const int place = (d / kMatrixInner * kTokenColumns + first / kMatrixRows) * kTileNumbers;
    store_transposed(high, tile.high + place);
    if (!watch.has_low_part()) continue;
    expect_low_parts(tile);
    store_transposed(low, tile.low + place);
  }
  return watch.all_have_parts();
}

// ---- Stored rows

// Sixteen tokens' numbers at a time, while 32 are in registers.
template <class Loader>
bool pack_stored_keys(const PackedTile& rows, Prefetcher& prefetcher, MatrixTile& tile) {
  Loader loader;
  if (!loader.begin(rows, tile)) return false;
  tile.is_exact = !Loader::kHasLow;
  for (int first = 0; first < kMaxTileTokens; first += kTokenStep) {
    for (int d = 0; d < tile.head_dim; d += kMatrixInner) {
      __m512i high[kTokenStep];
      __m512i low[kTokenStep];
      for (int t = 0; t < kTokenStep; ++t) {
        const Parts both = loader.load(first + t, d);
        high[t] = both.high;
        if constexpr (Loader::kHasLow) low[t] = both.low;
      }
      const int place = (d / kMatrixInner * kTokenColumns + first / kMatrixRows) * kTileNumbers;
      store_transposed(high, tile.high + place);
      if constexpr (Loader::kHasLow) store_transposed(low, tile.low + place);
    }
    prefetcher.step();
  }
  return loader.all_have_parts();
}

// Of two rows the words side by side, sixteen numbers a vector.
KVX_INLINE void store_pairs(__m512i even, __m512i odd, uint16_t* first, uint16_t* second) {
  static constexpr Table<uint16_t, 32> kFirst = order_of_pairs(0);
  static constexpr Table<uint16_t, 32> kSecond = order_of_pairs(16);
  _mm512_storeu_si512(first, _mm512_permutex2var_epi16(even, _mm512_load_si512(kFirst.at), odd));
  _mm512_storeu_si512(second, _mm512_permutex2var_epi16(even, _mm512_load_si512(kSecond.at), odd));
}

template <class Loader>
bool pack_stored_values(const PackedTile& rows, Prefetcher& prefetcher, MatrixTile& tile) {
  Loader loader;
  if (!loader.begin(rows, tile)) return false;
  tile.is_exact = !Loader::kHasLow;
  const int tiles_a_row = tile.head_dim / kMatrixRows;
  for (int t = 0; t < kMaxTileTokens; t += 2) {
    const int row_of_tiles = t / kMatrixInner * tiles_a_row;
    for (int d = 0; d < tile.head_dim; d += kMatrixInner) {
      const Parts even = loader.load(t, d);
      const Parts odd = loader.load(t + 1, d);
      const int place =
          (row_of_tiles + d / kMatrixRows) * kTileNumbers + t % kMatrixInner / 2 * kMatrixInner;
      store_pairs(even.high, odd.high, tile.high + place, tile.high + place + kTileNumbers);
      if constexpr (Loader::kHasLow) {
        store_pairs(even.low, odd.low, tile.low + place, tile.low + place + kTileNumbers);
      }
    }
    if (t % kTokenStep == 0) prefetcher.step();
  }
  return loader.all_have_parts();
}

template <class Loader>
inline constexpr MatrixPackers kPackers = {pack_stored_keys<Loader>, pack_stored_values<Loader>};

template <class Format>
KVX_INLINE const MatrixPackers* packers_of_format(bool wants_low) {
  using Codec = typename Format::Codec;
  using format::FormatId;
  constexpr FormatId kId = Format::kFacts.id;
  if constexpr (kId == FormatId::kBF16) {
    return &kPackers<Bf16Rows>;
  } else if constexpr (kId == FormatId::kF16) {
    return wants_low ? &kPackers<F16Rows<true>> : &kPackers<F16Rows<false>>;
  } else if constexpr (kId == FormatId::kFp8E4M3 || kId == FormatId::kFp8E5M2) {
    return &kPackers<Fp8Rows<Codec>>;
  } else if constexpr (kId == FormatId::kF32 || format::is_dual<Format>() ||
                       !format::has_fast_kernels<Format>()) {
    return nullptr;
  } else {
    using format::Packing;  // words of eight are nibbles in the same order
    constexpr Packing kPacking = Format::kFacts.packing;
    constexpr Packing kOrder = kPacking == Packing::kWords ? Packing::kNibbles : kPacking;
    return wants_low ? &kPackers<CodeRows<Codec, kOrder, true>>
                     : &kPackers<CodeRows<Codec, kOrder, false>>;
  }
}

static const MatrixPackers* find_packers(const format::FormatSpec& spec, int head_dim,
                                         bool wants_low) {
#define KVX_PACKERS(Format) packers_of_format<format::Format>,
  static constexpr const MatrixPackers* (*kOfFormat[])(bool) = {KVX_FOR_EACH_FORMAT(KVX_PACKERS)};
#undef KVX_PACKERS
  const bool is_fp8 =
      spec.facts->id == format::FormatId::kFp8E4M3 || spec.facts->id == format::FormatId::kFp8E5M2;
  if (is_fp8 && spec.has_scale() && scale_row(spec, head_dim).count > 1) return nullptr;
  const int id = static_cast<int>(spec.facts->id);
  return id < format::kNumFormats ? kOfFormat[id](wants_low) : nullptr;
}

// ---- Decoded rows

// [pair of tokens][number]: two rows, number beside number.
static bool pack_values(float* rows, int first, int num_tokens, MatrixTile& tile) {
  clear_rows_from(num_tokens, tile.head_dim, rows);
  alignas(64) uint16_t order[kMatrixInner];
  for (int i = 0; i < kMatrixInner; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i interleaved = _mm512_load_si512(order);
  const int row_of_tiles = first / kMatrixInner * (tile.head_dim / kMatrixRows);
  const int pairs_before = first % kMatrixInner / 2;
  PartsWatch watch;
  for (int t = 0; t < kTokenStep; t += 2) {
    const float* even = rows + t * tile.head_dim;
    for (int d = 0; d < tile.head_dim; d += kMatrixRows) {
      const __m512 from = _mm512_loadu_ps(even + d);
      const __m512 behind = _mm512_loadu_ps(even + tile.head_dim + d);
      const Parts both = parts_of(from, behind);
      watch.see(from, behind);
      watch.see_low(both.low);
      const int place =
          (row_of_tiles + d / kMatrixRows) * kTileNumbers + (pairs_before + t / 2) * kMatrixInner;
      _mm512_storeu_si512(tile.high + place, _mm512_permutexvar_epi16(interleaved, both.high));
      if (!watch.has_low_part()) continue;
      expect_low_parts(tile);
      _mm512_storeu_si512(tile.low + place, _mm512_permutexvar_epi16(interleaved, both.low));
    }
  }
  return watch.all_have_parts();
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
