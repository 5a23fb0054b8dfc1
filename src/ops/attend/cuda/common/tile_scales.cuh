// How a side's scales enter the tensor cores' path.
//
//   kRowBytes    stored scales of a token
//   kOnOperand   groups of 16 or 32 (kGroup): multiplied into an operand, as f16. Otherwise scales
//                go to the scores and the weights, in binary32, for kGroups parts of a row
#pragma once

#include <cuda_fp16.h>

#include "core/float16.hpp"
#include "ops/attend/cuda/common/mma.cuh"
#include "ops/attend/cuda/common/tile_copy_padded.cuh"

namespace kvx::ops::cuda {

// A token's scales for scores or weights: number = scale[group] * code + zero.
template <int Groups>
struct RowScale {
  float scale[Groups];
  float zero;
};

struct NoScale {
  static constexpr int kRowBytes = 0;
  static constexpr bool kOnOperand = false;
  static constexpr bool kIsNone = true;
  static constexpr bool kHasZero = false;
  static constexpr int kGroups = 1;
  static constexpr int kGroup = 0;
};

// One binary32 scale a row, or given for all rows (strides of 0).
struct RowF32 {
  static constexpr int kRowBytes = 4;
  static constexpr bool kOnOperand = false;
  static constexpr bool kIsNone = false;
  static constexpr bool kHasZero = false;
  static constexpr int kGroups = 1;
  static constexpr int kGroup = 0;
  __device__ static RowScale<1> load(uint32_t scales, int token, bool) {
    return {{__uint_as_float(load_shared_4(scales + token * 4))}, 0.0f};
  }
  __device__ static RowScale<1> load(PaddedScales scales, int token, bool is_bf16) {
    return load(scales.at, token, is_bf16);
  }
};

// One f16 scale a row.
struct RowF16 {
  static constexpr int kRowBytes = 2;
  static constexpr bool kOnOperand = false;
  static constexpr bool kIsNone = false;
  static constexpr bool kHasZero = false;
  static constexpr int kGroups = 1;
  static constexpr int kGroup = 0;
  __device__ static RowScale<1> load(uint32_t scales, int token, bool) {
    const auto bits = static_cast<uint16_t>(load_shared_2(scales + token * 2));
    return {{__half2float(__ushort_as_half(bits))}, 0.0f};
  }
  __device__ static RowScale<1> load(PaddedScales scales, int token, bool is_bf16) {
    return load(scales.at, token, is_bf16);
  }
};

// One binary32 scale a row, or one f16 scale that is a half of a word: the other half is another
// head's, as in [tokens, heads]. scales: of the half.
struct RowWord {
  static constexpr int kRowBytes = 4;
  static constexpr bool kOnOperand = false;
  static constexpr bool kIsNone = false;
  static constexpr bool kHasZero = false;
  static constexpr int kGroups = 1;
  static constexpr int kGroup = 0;
  __device__ static RowScale<1> load(uint32_t scales, int token, bool is_f16) {
    const uint32_t at = scales + token * 4;
    if (!is_f16) return {{__uint_as_float(load_shared_4(at))}, 0.0f};
    return {{__half2float(__ushort_as_half(static_cast<uint16_t>(load_shared_2(at))))}, 0.0f};
  }
  __device__ static RowScale<1> load(PaddedScales scales, int token, bool is_f16) {
    return load(scales.at, token, is_f16);
  }
};

// The type that load() asks about, where rows may have scales of two.
template <class Scale>
inline constexpr format::ScaleType kAskedType = format::ScaleType::kBF16;
template <>
inline constexpr format::ScaleType kAskedType<RowWord> = format::ScaleType::kF16;

// f16 scales of groups of 64.
template <int Dim>
struct GroupF16 {
  static constexpr int kRowBytes = Dim / 64 * 2;
  static constexpr bool kOnOperand = false;
  static constexpr bool kIsNone = false;
  static constexpr bool kHasZero = false;
  static constexpr int kGroups = Dim / 64;
  static constexpr int kGroup = 0;
  __device__ static RowScale<kGroups> load(uint32_t scales, int token, bool) {
    if constexpr (kGroups == 1) {
      return {{__half2float(
                  __ushort_as_half(static_cast<uint16_t>(load_shared_2(scales + token * 2))))},
              0.0f};
    } else {
      const uint32_t bits = load_shared_4(scales + token * 4);
      const float2 both = __half22float2(reinterpret_cast<const __half2&>(bits));
      return {{both.x, both.y}, 0.0f};
    }
  }
  // Groups that are not there have a scale of 0.
  __device__ static RowScale<kGroups> load(PaddedScales scales, int token, bool) {
    RowScale<kGroups> row = {};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t bits = load_shared_2(scales.at + token * scales.row_bytes + 2 * i);
      const float scale = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
      row.scale[i] = 2 * i < scales.row_bytes ? scale : 0.0f;
    }
    return row;
  }
};

// [scale: 2 bytes][zero: 2 bytes], f16 or bf16.
struct RowAffine {
  static constexpr int kRowBytes = 4;
  static constexpr bool kOnOperand = false;
  static constexpr bool kIsNone = false;
  static constexpr bool kHasZero = true;
  static constexpr int kGroups = 1;
  static constexpr int kGroup = 0;
  __device__ static RowScale<1> load(uint32_t scales, int token, bool is_bf16) {
    const uint32_t bits = load_shared_4(scales + token * 4);
    if (is_bf16) return {{__uint_as_float(bits << 16)}, __uint_as_float(bits & 0xFFFF0000u)};
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(bits));
    return {{both.x}, both.y};
  }
  __device__ static RowScale<1> load(PaddedScales scales, int token, bool is_bf16) {
    return load(scales.at, token, is_bf16);
  }
};

// The largest of many tokens' scales.
template <class Scale>
struct LargestScale {
  float largest = 0;
  template <class Scales>
  __device__ void take(Scales scales, int token, bool is_bf16) {
    const auto row = Scale::load(scales, token, is_bf16);
#pragma unroll
    for (int i = 0; i < Scale::kGroups; ++i) largest = fmaxf(largest, row.scale[i]);
  }
  __device__ float value() const {
    return largest;
  }
};
template <>
struct LargestScale<GroupF16<128>> {
  uint32_t of_groups = 0;
  __device__ void take(uint32_t scales, int token, bool) {
    of_groups = max_f16x2(of_groups, load_shared_4(scales + token * 4));
  }
  __device__ void take(PaddedScales scales, int token, bool is_bf16) {
    const auto row = GroupF16<128>::load(scales, token, is_bf16);
    of_groups = max_f16x2(of_groups, MmaF16::pack(row.scale[0], row.scale[1]));
  }
  __device__ float value() const {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(of_groups));
    return fmaxf(both.x, both.y);
  }
};

// Scales that multiply the operand are made from four bytes, low first, as pairs of f16; or from
// the two lowest.
struct FromE4M3 {
  static constexpr float kUnit = 1.0f;
  __device__ static uint32_t f16x2_of_two(uint32_t bytes) { return e4m3x2_to_f16x2(bytes); }
  __device__ static Two f16x2(uint32_t bytes) { return e4m3x4_to_f16x2(bytes); }
};
// The same times 2^7, for numbers that were decoded at f16's lower end: sums that go on for a whole
// work tile would lose digits there, since the tensor cores take the least exponent for theirs.
struct FromE4M3Raised {
  static constexpr float kUnit = 0.0078125f;
  __device__ static Two f16x2(uint32_t bytes) {
    constexpr uint32_t kTwoTo7 = 0x58005800u;
    const Two scales = e4m3x4_to_f16x2(bytes);
    return {multiply_f16x2(scales.a, kTwoTo7), multiply_f16x2(scales.b, kTwoTo7)};
  }
};
// 2^(byte - 127) times 2^Raise in f16's range. Larger ones become infinite and stay visible; groups
// under the range lose digits that are 2^-24 of it and less. All digits stay together with TileE2M1
// and Raise 4 in groups whose largest number lies between 2^-16 and 2^13, with TileE2M1Interleaved
// and Raise 6 between 2^-13 and 2^11.
template <int Raise>
struct FromE8M0Raised {
  static constexpr float kUnit = 1.0f / (1 << Raise);
  __device__ static uint32_t f16x2_of_two(uint32_t bytes) {
    return of_halves(__byte_perm(bytes, 0, 0x4140));
  }
  // Byte i of a word, twice.
  __device__ static uint32_t f16x2_of_byte(uint32_t word, uint32_t i) {
    return of_halves(__byte_perm(word, 0, i * 0x0101u | 0x4040u));
  }
  __device__ static Two f16x2(uint32_t bytes) {
    return {f16x2_of_two(bytes), of_halves(__byte_perm(bytes, 0, 0x4342))};
  }

 private:
  // A byte in each half.
  __device__ static uint32_t of_halves(uint32_t both) {
    constexpr uint32_t kMinusBias = static_cast<uint16_t>(15 + Raise - 127) * 0x00010001u;
    constexpr uint32_t kLargest = 31 * 0x00010001u;
    return __viaddmin_s16x2_relu(both, kMinusBias, kLargest) << 10;
  }
};

using FromE8M0 = FromE8M0Raised<4>;

template <int Dim, int Group, class From>
struct OperandScale {
  static constexpr int kRowBytes = Dim / Group;
  static constexpr int kGroup = Group;
  static constexpr bool kOnOperand = true;
  static constexpr bool kIsNone = false;
  static constexpr bool kHasZero = false;
  static constexpr int kGroups = 1;
  static constexpr float kUnit = From::kUnit;

  // A token's scales, first byte lowest.
  struct Row {
    uint32_t words[4];
  };
  __device__ static Row load_row(uint32_t scales, int token) {
    if constexpr (kRowBytes == 8) {
      const uint2 both = load_shared_8(scales + token * 8);
      return {both.x, both.y};
    }
    if constexpr (kRowBytes == 4) return {load_shared_4(scales + token * 4)};
    return {load_shared_2(scales + token * 2)};
  }
  // Rows of any length on any address. Scales that are not there are 0: a neighbour's NaN would
  // make one of the zeros that it meets.
  __device__ static Row load_row(PaddedScales scales, int token) {
    constexpr int kWords = (kRowBytes + 3) / 4;
    const int byte = token * scales.row_bytes;
    const uint32_t first = scales.at + (byte & ~3);
    Row row = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) row.words[i] = load_shared_4(first + 4 * i);
    if (scales.row_bytes % 4 != 0) {  // then another word lies behind, of this tile's scales
      const uint32_t last = load_shared_4(first + 4 * kWords);
      const int shift = byte % 4 * 8;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t next = i + 1 < kWords ? row.words[i + 1] : last;
        row.words[i] = __funnelshift_r(row.words[i], next, shift);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int left = scales.row_bytes - 4 * i;
      row.words[i] &= left >= 4 ? ~0u : left > 0 ? (1u << 8 * left) - 1 : 0u;
    }
    return row;
  }
  __device__ static Two f16x2(uint32_t bytes) {
    return From::f16x2(bytes);
  }
  __device__ static uint32_t f16x2_of_two(uint32_t bytes) {
    return From::f16x2_of_two(bytes);
  }
  __device__ static uint32_t f16x2_of_byte(uint32_t word, uint32_t i) {
    return From::f16x2_of_byte(word, i);
  }
  // Of two tokens, a pair for each chunk (32 channels): of its group in that place.
  __device__ static void pairs(const Row& a, const Row& b, uint32_t place,
                               uint32_t (&of_chunk)[Dim / 32]) {
    constexpr int kGroupsAChunk = 32 / Group;
    constexpr int kChunksAWord = 4 / kGroupsAChunk;
#pragma unroll
    for (int c = 0; c < Dim / 32; c += 2) {
      const uint32_t i = place + (c % kChunksAWord) * kGroupsAChunk;  // of the word's bytes
      const uint32_t bytes =
          i | ((i + 4) << 4) | ((i + kGroupsAChunk) << 8) | ((i + kGroupsAChunk + 4) << 12);
      const Two both =
          f16x2(__byte_perm(a.words[c / kChunksAWord], b.words[c / kChunksAWord], bytes));
      of_chunk[c] = both.a;
      of_chunk[c + 1] = both.b;
    }
  }
};

}  // namespace kvx::ops::cuda
