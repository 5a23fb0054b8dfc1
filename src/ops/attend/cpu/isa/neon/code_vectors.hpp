// What integer products over codes need of Advanced SIMD, with dot products or without; dots.hpp
// has what differs. The x86 levels have the same functions.
#pragma once

#include <arm_neon.h>

#include "ops/attend/cpu/code_chunks.hpp"
#include "ops/attend/cpu/no_words.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE uint8x16_t to_bytes(const Ints& lanes) {
  return __builtin_bit_cast(uint8x16_t, lanes);
}
KVX_INLINE Ints to_ints(uint8x16_t bytes) {
  return __builtin_bit_cast(Ints, bytes);
}

// Sixteen bytes of a row, or the last eight. Requires: row_bytes is a multiple of 8.
KVX_INLINE uint8x16_t load_chunk(const uint8_t* row, int row_bytes, int offset) {
  return offset + 16 <= row_bytes ? vld1q_u8(row + offset)
                                  : vcombine_u8(vld1_u8(row + offset), vdup_n_u8(0));
}

// Whether add_four_dots is faster than four times add_dots: with FEAT_DotProd it spares the copies
// of a word to every lane, without it takes eighteen instructions.
inline constexpr bool kAddsFours = true;
template <Operands O>
Ints add_dots(Ints sum, Ints a, Ints b);  // never called

KVX_INLINE Ints to_nearest(Widest x) {
  return __builtin_bit_cast(Ints, vcvtnq_s32_f32(__builtin_bit_cast(float32x4_t, x)));
}

// As many vectors of sums and operands as the registers hold: four tokens each of a key tile,
// parts of four numbers of a value tile.
constexpr int key_vectors_together(Fixed form) {
  return form == Fixed::kTwoDigits ? 2 : 4;
}
inline constexpr int kPartsTogether = 2;

template <class Codec, int Offset>
KVX_INLINE uint8x16_t nibble_table() {
  static constexpr Table<int8_t, 16> kBytes = CodeBytes<Codec>::nibble_bytes(Offset);
  return vreinterpretq_u8_s8(vld1q_s8(kBytes.at));
}

// ---- Queries and keys

// The lowest bytes of four numbers of a row, number and those behind it, in the order of places.
// chunk: of the row's sixteen numbers that they are among.
template <class Codec, format::Packing P>
KVX_INLINE void store_in_places(Ints numbers, int8_t* chunk, int number) {
  static constexpr Table<int8_t, 16> kPlaceOf = [] {
    Table<int8_t, 16> places = {};
    for (int8_t place = 0; place < 16; ++place) places.at[number_at<Codec, P>(place)] = place;
    return places;
  }();
  for (int lane = 0; lane < kIntLanes; ++lane) {
    chunk[kPlaceOf.at[number + lane]] = static_cast<int8_t>(numbers[lane]);
  }
}

// A key's byte of each low nibble, of bytes that have nothing in the high one.
template <class Codec>
KVX_INLINE uint8x16_t key_bytes(uint8x16_t nibbles) {
  using Code = CodeBytes<Codec>;
  if constexpr (is_flipped_nibble<Codec>()) {
    return veorq_u8(nibbles, vdupq_n_u8(Code::kNibbleFlip));
  } else {
    return vqtbl1q_u8(nibble_table<Codec, Code::kKeyOffset>(), nibbles);
  }
}

// words[w], lane t = word w of rows[t].
KVX_INLINE void transpose_words(const uint8x16_t* rows, uint8x16_t* words) {
  const auto zip = [](uint8x16_t a, uint8x16_t b) {
    return uint32x4x2_t{{vtrn1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)),
                         vtrn2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b))}};
  };
  const uint32x4x2_t low = zip(rows[0], rows[1]);
  const uint32x4x2_t high = zip(rows[2], rows[3]);
  for (int i = 0; i < 2; ++i) {
    const auto a = vreinterpretq_u64_u32(low.val[i]);
    const auto b = vreinterpretq_u64_u32(high.val[i]);
    words[i] = vreinterpretq_u8_u64(vtrn1q_u64(a, b));
    words[i + 2] = vreinterpretq_u8_u64(vtrn2q_u64(a, b));
  }
}

// The bytes from `offset` on of four tokens. rows: [4]. keys: [kKeysAChunk], in the order of the
// tile; of a row's last eight bytes the first half.
template <class Codec>
KVX_INLINE void load_keys(const uint8_t* const* rows, int row_bytes, int offset, Ints* keys) {
  using Code = CodeBytes<Codec>;
  uint8x16_t chunks[4];
  uint8x16_t words[4];
  for (int t = 0; t < 4; ++t) chunks[t] = load_chunk(rows[t], row_bytes, offset);
  transpose_words(chunks, words);
  for (int w = 0; w < 4; ++w) {
    if constexpr (Code::kIsNibble) {
      keys[2 * w] = to_ints(key_bytes<Codec>(vandq_u8(words[w], vdupq_n_u8(15))));
      keys[2 * w + 1] = to_ints(key_bytes<Codec>(vshrq_n_u8(words[w], 4)));
    } else {
      keys[w] = to_ints(veorq_u8(words[w], vdupq_n_u8(Code::kKeyFlip)));
    }
  }
}

// ---- Values and weights

template <class Codec>
constexpr float value_unit() {
  return CodeBytes<Codec>::kUnit;
}
template <class Codec>
constexpr int value_bias() {
  return CodeBytes<Codec>::kValueBias;
}

// Byte j of four tokens' chunks, side by side: [4] of four js each.
template <class Rows>
KVX_INLINE void interleave_chunks(Rows rows, int row_bytes, int offset, uint8x16_t* fours) {
  uint8x16_t tokens[4];
  for (int t = 0; t < 4; ++t) tokens[t] = load_chunk(rows[t], row_bytes, offset);
  const auto zip = [](uint8x16_t a, uint8x16_t b) {
    return uint16x8x2_t{
        {vreinterpretq_u16_u8(vzip1q_u8(a, b)), vreinterpretq_u16_u8(vzip2q_u8(a, b))}};
  };
  const uint16x8x2_t low = zip(tokens[0], tokens[1]);
  const uint16x8x2_t high = zip(tokens[2], tokens[3]);
  for (int i = 0; i < 2; ++i) {
    fours[2 * i] = vreinterpretq_u8_u16(vzip1q_u16(low.val[i], high.val[i]));
    fours[2 * i + 1] = vreinterpretq_u8_u16(vzip2q_u16(low.val[i], high.val[i]));
  }
}

KVX_INLINE void store_four(uint8x16_t four, int8_t* at) {
  vst1q_u8(reinterpret_cast<uint8_t*>(at), four);
}

// Four bytes of four tokens: eight numbers in two parts.
template <class Codec, format::Packing P>
KVX_INLINE void store_nibbles(uint8x16_t four, int8_t* place) {
  using Code = CodeBytes<Codec>;
  const uint8x16_t table = nibble_table<Codec, Code::kValueBias + Code::kValueShift>();
  const uint8x16_t low = vqtbl1q_u8(table, vandq_u8(four, vdupq_n_u8(15)));
  const uint8x16_t high = vqtbl1q_u8(table, vshrq_n_u8(four, 4));
  const uint32x4_t a = vreinterpretq_u32_u8(low);
  const uint32x4_t b = vreinterpretq_u32_u8(high);
  if constexpr (P == format::Packing::kTurboMind) {
    store_four(vreinterpretq_u8_u32(vuzp1q_u32(a, b)), place);
    store_four(vreinterpretq_u8_u32(vuzp2q_u32(a, b)), place + kPartBytes);
  } else {
    static_assert(P == format::Packing::kNibbles, "store_nibbles has no branch for this packing");
    store_four(vreinterpretq_u8_u32(vzip1q_u32(a, b)), place);
    store_four(vreinterpretq_u8_u32(vzip2q_u32(a, b)), place + kPartBytes);
  }
}

template <class Codec, format::Packing P>
KVX_INLINE void unpack_values(const PackedTile& values, int8_t* tile, Prefetcher& prefetcher) {
  using Code = CodeBytes<Codec>;
  const int row_bytes = values.head_dim * Codec::kBits / 8;
  const int num_fours = values.padded_tokens() / 4;
  prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
  for (int place = 0; place < num_fours; ++place) {
    prefetcher.step();
    const uint8_t* const* rows = values.codes + 4 * place;
    int8_t* out = tile + place * kPlaceBytes;
    for (int offset = 0; offset < row_bytes; offset += 16) {
      uint8x16_t fours[4];
      interleave_chunks(rows, row_bytes, offset, fours);
      for (int i = 0; i < 4 && offset + 4 * i < row_bytes; ++i) {
        if constexpr (Code::kIsNibble) {
          store_nibbles<Codec, P>(fours[i], out);
          out += 2 * kPartBytes;
        } else {
          store_four(veorq_u8(fours[i], vdupq_n_u8(Code::kValueFlip)), out);
          out += kPartBytes;
        }
      }
    }
  }
}

// Words from 0 to 65535, which sums and products take modulo 65536.
using Words = uint16x8_t;

KVX_INLINE Words pack_words(Ints a, Ints b) {
  return vcombine_u16(vqmovun_s32(__builtin_bit_cast(int32x4_t, a)),
                      vqmovun_s32(__builtin_bit_cast(int32x4_t, b)));
}
KVX_INLINE Words load_words(const uint16_t* words) {
  return vld1q_u16(words);
}
KVX_INLINE void store_words(Words numbers, uint16_t* words) {
  vst1q_u16(words, numbers);
}

// Less 32768, as multiply_words takes them.
KVX_INLINE Words words_to_signed(Words numbers) {
  return veorq_u16(numbers, vdupq_n_u16(0x8000));
}

// (a + 32768) * b / 32768, to nearest: the instruction takes words with a sign. b: at most 32767.
KVX_INLINE Words multiply_words(Words a, Words b) {
  const int16x8_t product = vqrdmulhq_s16(vreinterpretq_s16_u16(a), vreinterpretq_s16_u16(b));
  return vaddq_u16(vreinterpretq_u16_s16(product), b);
}

void store_weight_pairs(Words a, Words b, uint8_t* pairs);  // of levels with takes_words

// As digits, in the order of places, which is the tokens'.
KVX_INLINE void store_digits(Words a, Words b, uint8_t* high, uint8_t* low) {
  const uint8x16_t first = vreinterpretq_u8_u16(a);
  const uint8x16_t second = vreinterpretq_u8_u16(b);
  vst1q_u8(high, vuzp2q_u8(first, second));
  vst1q_u8(low, vuzp1q_u8(first, second));
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
