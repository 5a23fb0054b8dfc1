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

// Of four tokens' chunks, one a lane: 16 byte codes, or 8 bytes of nibbles in both halves, as
// [16 numbers x 4 tokens]. first: the byte of a chunk at which the part begins.
constexpr Table<uint8_t, 64> interleave_index(bool is_nibble, int first) {
  Table<uint8_t, 64> index = {};
  for (int i = 0; i < 64; ++i) {
    const int column = is_nibble ? i / 4 % 8 : i / 4;
    index.at[i] = static_cast<uint8_t>(i % 4 * 16 + first + column);
  }
  return index;
}

// The lane of each of a part's numbers: nibbles have their low ones in lanes 0 to 7, high ones in
// lanes 8 to 15.
template <class Codec, format::Packing P>
constexpr Table<int32_t, 16> lane_of_number() {
  Table<int32_t, 16> lane = {};
  for (int i = 0; i < 16; ++i) lane.at[i] = i;
  for (int byte = 0; CodeBytes<Codec>::kIsNibble && byte < 8; ++byte) {
    lane.at[low_nibble_number<P>(byte)] = byte;
    lane.at[high_nibble_number<P>(byte)] = 8 + byte;
  }
  return lane;
}

template <class Codec>
KVX_INLINE void unpack_values(const PackedTile& values, int8_t* tile, Prefetcher& prefetcher) {
  using Code = CodeBytes<Codec>;
  const int row_bytes = values.head_dim * Codec::kBits / 8;
  const int num_fours = values.padded_tokens() / 4;
  const __m512i table = Code::kIsNibble ? Code::template nibble_table<0>() : __m512i{};
  const __m512i low_four = _mm512_set1_epi8(15);
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(Code::kValueFlip));
  static constexpr Table<uint8_t, 64> kFirst = interleave_index(Code::kIsNibble, 0);
  static constexpr Table<uint8_t, 64> kSecond = interleave_index(Code::kIsNibble, 8);
  const __m512i first_part = _mm512_load_si512(kFirst.at);
  const __m512i second_part = _mm512_load_si512(kSecond.at);
  const __m512i shifts = _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0);
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
  __m512i lanes;    // lane_of_number
  int value_bias;
};

// ---- Weights: a row's probabilities times the tokens' steps

// What a row's integer sums are to be multiplied with, and what all of its numbers get from the
// tokens' zeros.
struct RowWeight {
  float scale;
  float zero;
};

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

// p * steps of 64 tokens as digits, [high: 64][low: 64] in the order of places; with one digit
// there are no low ones. Requires: p * steps is 0 to 255 * 256, or to 255.
KVX_INLINE void store_weight_digits(const __m512* p, const float* steps, int num_vectors,
                                    uint8_t* digits) {
  __m512i fixed[4] = {};
  for (int i = 0; i < num_vectors; ++i) {
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

// sum over tokens of p * (zero - bias * step).
KVX_INLINE float sum_of_zeros(const __m512* p, const ValueTile& tile, int num_vectors) {
  const __m512 step_weight = _mm512_set1_ps(static_cast<float>(tile.value_bias) * tile.largest[0]);
  __m512 sum = {};
  for (int i = 0; i < num_vectors; ++i) {
    const __m512 zero = _mm512_fnmadd_ps(_mm512_loadu_ps(tile.steps + 16 * i), step_weight,
                                         _mm512_loadu_ps(tile.zeros + 16 * i));
    sum = _mm512_fmadd_ps(p[i], zero, sum);
  }
  return _mm512_reduce_add_ps(sum);
}

KVX_INLINE __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>(n >= 16 ? 0xFFFF : (1 << n) - 1);
}

// One row's digits, for every group.
KVX_INLINE RowWeight weigh_row(const ValueJob& job, const ValueTile& tile, int row,
                               uint8_t* digits) {
  constexpr float kMost = 255 * 256;
  constexpr float kNegligible = 0x1p-80f;  // beside the probability of 1 that some tile had
  const int n = job.values.padded_tokens();
  const int num_vectors = n / 16;
  __m512 p[kMaxTileTokens / 16];
  __m512 largest = _mm512_setzero_ps();
  for (int i = 0; i < num_vectors; ++i) {
    p[i] = _mm512_maskz_loadu_ps(first_lanes(job.values.num_tokens - 16 * i),
                                 job.p + row * job.p_stride + 16 * i);
    largest = _mm512_max_ps(largest, p[i]);
  }
  const float most = _mm512_reduce_max_ps(largest);
  const bool counts = most > kNegligible;
  const RowWeight weight = {counts ? most / kMost : 0.0f,
                            tile.zeros ? sum_of_zeros(p, tile, num_vectors) : 0.0f};
  const __m512 inverse = _mm512_set1_ps(counts ? kMost / most : 0.0f);
  for (int i = 0; i < num_vectors; ++i) p[i] = _mm512_mul_ps(p[i], inverse);
  for (int g = 0; g < tile.num_groups; ++g) {
    store_weight_digits(p, tile.steps + g * n, num_vectors, digits + g * 128);
  }
  return weight;
}

// ---- Products

// Parts * 16 numbers from `part` on, for Rows rows. OneGroup: they share their steps, so their
// weights are loaded once. Tokens that the tile lacks weigh nothing, whatever their bytes say.
template <int Rows, int Parts, bool OneGroup>
KVX_INLINE void add_parts(const ValueJob& job, const ValueTile& tile, int row, int part,
                          const RowWeight* weights) {
  __m512i high[Rows][Parts] = {};
  __m512i low[Rows][Parts] = {};
  int group[Parts];
  for (int i = 0; i < Parts; ++i) group[i] = (part + i) / tile.group_parts;
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
  for (int r = 0; r < Rows; ++r) {
    float* sums = job.sums + int64_t{row + r} * job.values.head_dim + part * 16;
    for (int i = 0; i < Parts; ++i) {
      const __m512 scale = _mm512_set1_ps(weights[r].scale * tile.largest[group[i]]);
      const __m512i fixed = join_digits(high[r][i], low[r][i]);
      const __m512 sum = _mm512_permutexvar_ps(tile.lanes, _mm512_cvtepi32_ps(fixed));
      const __m512 before =
          _mm512_add_ps(_mm512_loadu_ps(sums + 16 * i), _mm512_set1_ps(weights[r].zero));
      _mm512_storeu_ps(sums + 16 * i, _mm512_fmadd_ps(sum, scale, before));
    }
  }
}

inline constexpr int kPartsTogether = 2;  // parts whose sums fit in registers

template <int Rows>
static void add_chunk(const ValueJob& job, const ValueTile& tile, int row) {
  RowWeight weights[Rows];
  for (int r = 0; r < Rows; ++r) {
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
  unpack_values<Codec>(values, codes, job.prefetcher);
  const int group =
      values.spec->group_size == format::kWholeRow ? values.head_dim : values.spec->group_size;
  static constexpr Table<int32_t, 16> kLaneOfNumber = lane_of_number<Codec, P>();
  const ValueTile tile = {.codes = codes,
                          .steps = steps,
                          .zeros = is_affine ? steps + n : nullptr,
                          .largest = largest,
                          .digits = digits,
                          .num_groups = num_groups,
                          .group_parts = group / 16,
                          .lanes = _mm512_load_si512(kLaneOfNumber.at),
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
