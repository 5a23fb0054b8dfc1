// Rows whose codes lie in fragments (ops/cache_view.hpp): bytes of a row, found fragment by
// fragment. The kernels that take rows by chunks or tiles need contiguous ones; those that take a
// warp a row read and write these too.
#pragma once

#include "ops/cache_view.hpp"

namespace kvx::ops::cuda {

__device__ inline bool is_fragmented(const SideView& side) {
  return side.codes.fragment_bytes != 0;
}

// How far byte i of a row lies from its first. Contiguous rows need no division.
__device__ inline int64_t byte_of_row(const CodeAddress& a, int i) {
  if (a.fragment_bytes == 0) return i;
  const int fragment = i / a.fragment_bytes;
  return fragment * a.fragment_stride + (i - fragment * a.fragment_bytes);
}

// Whether the rows are ggml's q4_0 blocks (format/q4_0.hpp).
__device__ inline bool holds_q4_0_blocks(const SideView& side) {
  return side.is_interleaved && is_fragmented(side);
}

// Calls move(word, i, bytes of a word) for bytes [first, first + count) of a row in fragments, in
// the widest words of up to four bytes that no fragment's end cuts. word: where byte first + i
// lies. row: the first fragment. first: a multiple of four.
template <class Move>
__device__ inline void for_each_word(int fragment_bytes, int64_t fragment_stride, uint8_t* row,
                                     int first, int count, const Move& move) {
  const uint32_t cuts = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row)) |
                        static_cast<uint32_t>(fragment_stride) |
                        static_cast<uint32_t>(fragment_bytes);
  const int word_bytes = cuts % 4 == 0 ? 4 : cuts % 2 == 0 ? 2 : 1;
  const int fragment = first / fragment_bytes;
  int within = first - fragment * fragment_bytes;
  row += fragment * fragment_stride;
  for (int i = 0; i < count; i += word_bytes) {
    move(row + within, i, word_bytes);
    within += word_bytes;
    if (within < fragment_bytes) continue;
    within = 0;
    row += fragment_stride;
  }
}

// Functions of their own: the kernels have a part for every format, which would each hold a copy.
// bytes: [count], on four bytes.
static __device__ __noinline__ void load_fragments(int fragment_bytes, int64_t fragment_stride,
                                                   const uint8_t* row, int first, int count,
                                                   uint8_t* bytes) {
  for_each_word(
      fragment_bytes, fragment_stride, const_cast<uint8_t*>(row), first, count,
      [bytes](const uint8_t* from, int i, int word_bytes) {
        if (word_bytes == 4) {
          *reinterpret_cast<uint32_t*>(bytes + i) = *reinterpret_cast<const uint32_t*>(from);
        } else if (word_bytes == 2) {
          *reinterpret_cast<uint16_t*>(bytes + i) = *reinterpret_cast<const uint16_t*>(from);
        } else {
          bytes[i] = *from;
        }
      });
}
static __device__ __noinline__ void store_fragments(int fragment_bytes, int64_t fragment_stride,
                                                    uint8_t* row, int first, int count,
                                                    const uint8_t* bytes) {
  for_each_word(
      fragment_bytes, fragment_stride, row, first, count,
      [bytes](uint8_t* to, int i, int word_bytes) {
        if (word_bytes == 4) {
          *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(bytes + i);
        } else if (word_bytes == 2) {
          *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(bytes + i);
        } else {
          *to = bytes[i];
        }
      });
}

}  // namespace kvx::ops::cuda
