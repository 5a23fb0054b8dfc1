// Weighted sums of integer codes: probabilities times steps as digits, values as a tile of bytes,
// and their products.
#pragma once

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// ---- Values
//
// The value tile: [head_dim / 16 parts][16 places of four tokens][16 numbers x 4 tokens], bytes.
// Place j holds tokens 4 * four_at(j) on, the order in which packing digits to bytes leaves them.

inline constexpr int kPlaces = kMaxTileTokens / 4;
inline constexpr int kPartBytes = kPlaces * 64;

constexpr int four_at(int place) {
  return place % 4 * 4 + place / 4;
}

// Of four tokens' chunks, one a lane, to [16 numbers x 4 tokens]: the byte of the chunk that has a
// part's number. first: the byte of a chunk at which the part begins.
template <class Codec, format::Packing P>
constexpr Table<uint8_t, 64> interleave_index(int first) {
  Table<uint8_t, 64> index = {};
  for (int token = 0; token < 4; ++token) {
    for (int byte = 0; byte < (CodeBytes<Codec>::kIsNibble ? 8 : 16); ++byte) {
      const auto chunk_byte = static_cast<uint8_t>(token * 16 + first + byte);
      if (CodeBytes<Codec>::kIsNibble) {
        index.at[4 * low_nibble_number<P>(byte) + token] = chunk_byte;
        index.at[4 * high_nibble_number<P>(byte) + token] = chunk_byte;
      } else {
        index.at[4 * byte + token] = chunk_byte;
      }
    }
  }
  return index;
}

// By how many bits to shift a number's byte to have its nibble in the low four.
template <format::Packing P>
constexpr Table<int32_t, 16> nibble_shifts() {
  Table<int32_t, 16> shifts = {};
  for (int byte = 0; byte < 8; ++byte) shifts.at[high_nibble_number<P>(byte)] = 4;
  return shifts;
}

template <class Codec, format::Packing P>
KVX_INLINE void unpack_values(const PackedTile& values, int8_t* tile, Prefetcher& prefetcher) {
  using Code = CodeBytes<Codec>;
  const int row_bytes = values.head_dim * Codec::kBits / 8;
  const int num_fours = values.padded_tokens() / 4;
  const __m512i table = Code::kIsNibble ? Code::template nibble_table<0>() : __m512i{};
  const __m512i low_four = _mm512_set1_epi8(15);
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(Code::kValueFlip));
  static constexpr Table<uint8_t, 64> kFirst = interleave_index<Codec, P>(0);
  static constexpr Table<uint8_t, 64> kSecond = interleave_index<Codec, P>(8);
  static constexpr Table<int32_t, 16> kShifts = nibble_shifts<P>();
  const __m512i first_part = _mm512_load_si512(kFirst.at);
  const __m512i second_part = _mm512_load_si512(kSecond.at);
  const __m512i shifts = _mm512_load_si512(kShifts.at);
  const auto nibbles = [&](__m512i chunks, __m512i index) {
    const __m512i columns = _mm512_permutexvar_epi8(index, chunks);
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi32(columns, shifts), low_four);
    return _mm512_shuffle_epi8(table, codes);
  };
  prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
  for (int place = 0; place < kPlaces; ++place) {
    if (four_at(place) >= num_fours) continue;
    prefetcher.step();
    const uint8_t* const* rows = values.codes + 4 * four_at(place);
    int8_t* out = tile + place * 64;
    for (int offset = 0; offset < row_bytes; offset += 16) {
      const __m512i chunks = load_chunks(rows, 1, row_bytes, offset);
      if constexpr (Code::kIsNibble) {
        _mm512_storeu_si512(out, nibbles(chunks, first_part));
        out += kPartBytes;
        if (offset + 16 > row_bytes) break;
        _mm512_storeu_si512(out, nibbles(chunks, second_part));
      } else {
        const __m512i codes = _mm512_permutexvar_epi8(first_part, chunks);
        _mm512_storeu_si512(out, _mm512_xor_si512(codes, flip));
      }
      out += kPartBytes;
    }
  }
}

// What a pass over the value tile needs to know.
struct ValueTile {
  const int8_t* codes;
  const float* steps;    // [groups, padded_tokens], relative to the largest of the group
  const float* zeros;    // [padded_tokens], or null
  const float* largest;  // [groups]
  uint8_t* digits;       // [rows of a chunk][groups][high and low][64 tokens in order of places]
  int num_groups;
  int group_parts;  // parts of 16 numbers in a group
  int value_bias;
};

// ---- Weights: a row's probabilities times the tokens' steps

// Divides each group's steps by their largest. False: a step is no finite number, or negative, or
// the group's largest is too small to divide by.
KVX_INLINE bool normalize_steps(float* steps, int num_groups, int n, float* largest) {
  constexpr float kSmallest = 0x1p-100f;
  constexpr float kLargest = 0x1p100f;
  for (int g = 0; g < num_groups; ++g, steps += n) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 fits = 0xFFFF;
    for (int t = 0; t < n; t += 16) {
      const __m512 step = _mm512_loadu_ps(steps + t);
      fits &= _mm512_cmp_ps_mask(step, _mm512_setzero_ps(), _CMP_GE_OQ);
      most = _mm512_max_ps(most, step);
    }
    largest[g] = _mm512_reduce_max_ps(most);
    if (fits != 0xFFFF || !(largest[g] < kLargest)) return false;
    if (largest[g] < kSmallest && largest[g] != 0) return false;
    const __m512 inverse = _mm512_set1_ps(largest[g] == 0 ? 0.0f : 1.0f / largest[g]);
    for (int t = 0; t < n; t += 16) {
      _mm512_storeu_ps(steps + t, _mm512_mul_ps(_mm512_loadu_ps(steps + t), inverse));
    }
  }
  return true;
}

// Of a tile with fewer than 64 tokens what follows takes 64 all the same: the probabilities of
// those that it lacks are 0, and whatever is read as their steps weighs nothing.
inline constexpr int kTileVectors = kMaxTileTokens / 16;

KVX_INLINE __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>(n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1 << n) - 1);
}

// p * steps of 64 tokens as digits, [high: 64][low: 64] in the order of places. Requires: p * steps
// is 0 to 255 * 256, or its p is 0: a product that is no number packs to 0.
KVX_INLINE void store_weight_digits(const __m512* p, const float* steps, uint8_t* digits) {
  __m512i fixed[kTileVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kTileVectors; ++i) {
    fixed[i] = _mm512_cvtps_epi32(_mm512_mul_ps(p[i], _mm512_loadu_ps(steps + 16 * i)));
  }
  const __m512i a = _mm512_packus_epi32(fixed[0], fixed[1]);
  const __m512i b = _mm512_packus_epi32(fixed[2], fixed[3]);
  const __m512i byte = _mm512_set1_epi16(255);
  const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  const __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
  _mm512_storeu_si512(digits, high);
  _mm512_storeu_si512(digits + 64, low);
}

// One row's digits, for every group. Returns what its integer sums are to be multiplied with.
KVX_INLINE float weigh_row(const ValueJob& job, const ValueTile& tile, int row, uint8_t* digits) {
  constexpr float kMost = 255 * 256;
  constexpr float kNegligible = 0x1p-80f;  // beside the probability of 1 that some tile had
  const int n = job.values.padded_tokens();
  const int num_groups = tile.num_groups;
  const float* steps = tile.steps;
  const float* source = job.p + row * job.p_stride;
  __m512 p[kTileVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kTileVectors; ++i) {
    p[i] = _mm512_maskz_loadu_ps(first_lanes(job.values.num_tokens - 16 * i), source + 16 * i);
  }
  const float most =
      _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(p[0], p[1]), _mm512_max_ps(p[2], p[3])));
  const bool counts = most > kNegligible;
  const __m512 inverse = _mm512_set1_ps(counts ? kMost / most : 0.0f);
#pragma GCC unroll 4
  for (int i = 0; i < kTileVectors; ++i) p[i] = _mm512_mul_ps(p[i], inverse);
  for (int g = 0; g < num_groups; ++g) store_weight_digits(p, steps + g * n, digits + g * 128);
  return counts ? most / kMost : 0.0f;
}

// All of a row's numbers get sum over tokens of p * (zero - bias * step).
KVX_INLINE void add_value_zeros(const ValueJob& job, const ValueTile& tile, int row) {
  const __m512 step_weight = _mm512_set1_ps(static_cast<float>(tile.value_bias) * tile.largest[0]);
  __m512 products = {};
  for (int t = 0; t < job.values.num_tokens; t += 16) {
    const __mmask16 there = first_lanes(job.values.num_tokens - t);
    const __m512 p = _mm512_maskz_loadu_ps(there, job.p + row * job.p_stride + t);
    const __m512 zero = _mm512_fnmadd_ps(_mm512_maskz_loadu_ps(there, tile.steps + t), step_weight,
                                         _mm512_maskz_loadu_ps(there, tile.zeros + t));
    products = _mm512_fmadd_ps(p, zero, products);
  }
  const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(products));
  float* sums = job.sums + int64_t{row} * job.values.head_dim;
  for (int d = 0; d < job.values.head_dim; d += 16) {
    _mm512_storeu_ps(sums + d, _mm512_add_ps(_mm512_loadu_ps(sums + d), sum));
  }
}

// ---- Products

// Parts * 16 numbers from `part` on, for Rows rows. OneGroup: they share their steps, so their
// weights are loaded once. Tokens that the tile lacks weigh nothing, whatever their bytes say.
template <int Rows, int Parts, bool OneGroup>
KVX_INLINE void add_parts(const ValueJob& job, const ValueTile& tile, int row, int part,
                          const float* weights) {
  __m512i high[Rows][Parts] = {};
  __m512i low[Rows][Parts] = {};
  int group[Parts];
  __m512 largest[Parts];
  for (int i = 0; i < Parts; ++i) {
    group[i] = (part + i) / tile.group_parts;
    largest[i] = _mm512_set1_ps(tile.largest[group[i]]);
  }
  const int head_dim = job.values.head_dim;
  float* sums = job.sums + int64_t{row} * head_dim + part * 16;
  const int8_t* codes = tile.codes + int64_t{part} * kPartBytes;
  const uint8_t* digits[Rows][Parts];
  for (int r = 0; r < Rows; ++r) {
    for (int i = 0; i < Parts; ++i) {
      digits[r][i] = tile.digits + (r * tile.num_groups + group[i]) * 128;
    }
  }
  for (int first = 0; first < kPlaces; first += 4) {
    job.prefetcher.step();
#pragma GCC unroll 4
    for (int next = 0; next < 4; ++next) {
      const int place = first + next;
      __m512i values[Parts];
      for (int i = 0; i < Parts; ++i) {
        values[i] = _mm512_loadu_si512(codes + i * kPartBytes + place * 64);
      }
      for (int r = 0; r < Rows; ++r) {
        __m512i weight = splat_digits(digits[r][0] + 4 * place);
        for (int i = 0; i < Parts; ++i) {
          if (!OneGroup && i > 0) weight = splat_digits(digits[r][i] + 4 * place);
          high[r][i] = _mm512_dpbusd_epi32(high[r][i], weight, values[i]);
        }
        weight = splat_digits(digits[r][0] + 64 + 4 * place);
        for (int i = 0; i < Parts; ++i) {
          if (!OneGroup && i > 0) weight = splat_digits(digits[r][i] + 64 + 4 * place);
          low[r][i] = _mm512_dpbusd_epi32(low[r][i], weight, values[i]);
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r, sums += head_dim) {
    const __m512 weight = _mm512_set1_ps(weights[r]);
    for (int i = 0; i < Parts; ++i) {
      const __m512 sum = _mm512_cvtepi32_ps(join_digits(high[r][i], low[r][i]));
      const __m512 scale = _mm512_mul_ps(weight, largest[i]);
      _mm512_storeu_ps(sums + 16 * i, _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(sums + 16 * i)));
    }
  }
}

inline constexpr int kPartsTogether = 2;  // parts whose sums fit in registers

template <int Rows>
static void add_chunk(const ValueJob& job, const ValueTile& tile, int row) {
  float weights[Rows];
  for (int r = 0; r < Rows; ++r) {
    if (tile.zeros) add_value_zeros(job, tile, row + r);
    weights[r] = weigh_row(job, tile, row + r, tile.digits + r * tile.num_groups * 128);
  }
  const int num_parts = job.values.head_dim / 16;
  const bool share_steps = tile.num_groups == 1 || tile.group_parts % kPartsTogether == 0;
  int part = 0;
  for (; part + kPartsTogether <= num_parts; part += kPartsTogether) {
    share_steps ? add_parts<Rows, kPartsTogether, true>(job, tile, row, part, weights)
                : add_parts<Rows, kPartsTogether, false>(job, tile, row, part, weights);
  }
  for (; part < num_parts; ++part) {
    add_parts<Rows, 1, true>(job, tile, row, part, weights);
  }
}

template <class Codec, format::Packing P>
bool add_code_values(const ValueJob& job) {
  const PackedTile& values = job.values;
  const int n = values.padded_tokens();
  const bool is_affine = values.spec->is_affine();
  const ScaleRow scales = scale_row(*values.spec, values.head_dim);
  const int num_groups = is_affine ? 1 : scales.count;
  float* steps = job.scratch;
  float* largest = steps + scales.count * n;
  load_steps(values, scales, CodeBytes<Codec>::kUnit * tensor_scale_of(values), steps);
  if (!normalize_steps(steps, num_groups, n, largest)) return false;
  // Digits and codes lie on whole lines: a vector across two of them costs twice.
  auto* digits = reinterpret_cast<uint8_t*>(largest + (num_groups + 15) / 16 * 16);
  auto* codes = reinterpret_cast<int8_t*>(digits + kRowChunk * num_groups * 128);
  unpack_values<Codec, P>(values, codes, job.prefetcher);
  const int group =
      values.spec->group_size == format::kWholeRow ? values.head_dim : values.spec->group_size;
  const ValueTile tile = {.codes = codes,
                          .steps = steps,
                          .zeros = is_affine ? steps + n : nullptr,
                          .largest = largest,
                          .digits = digits,
                          .num_groups = num_groups,
                          .group_parts = group / 16,
                          .value_bias = CodeBytes<Codec>::kValueBias};
  const int steps_a_chunk =
      (values.head_dim / 16 + kPartsTogether - 1) / kPartsTogether * (kPlaces / 4);
  job.prefetcher.pace(PhaseShares::kAddValues, steps_a_chunk * num_row_chunks(job.num_rows));
  for_row_chunks(job.num_rows, [&]<int Rows>(int row) { add_chunk<Rows>(job, tile, row); });
  job.prefetcher.rest();
  return true;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
