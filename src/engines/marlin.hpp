// Converters to and from the 4-bit bytes of RESMP-DEV/metal-marlin, whose INT4 kernels read offset
// binary and whose Python cache calls a linear code "fp4".
#pragma once

#include <cstdint>
#include <span>

namespace kvx::engines {

// metal-marlin's INT4 nibble is value + 8; int4_row's is two's complement. Flipping the top bit
// of every nibble turns one into the other, so one function converts both ways, in place, for any
// packing of two nibbles per byte. A zero-filled buffer is all -8 in offset binary.
void swap_twos_complement_and_offset_binary(std::span<uint8_t> packed_nibbles);

// Encodes metal-marlin's Python "fp4", which is not E2M1: code q in 0..15 is (q - 8) / 2 scales,
// from -4 to 3.5 scales, although the scale is amax / 6, so that the largest numbers are clipped by
// up to 42 %. Its own Metal kernel reads these bytes as E2M1, the codes of fp4_row.
//
// row: [head_dim], finite; words: [head_dim / 2] bytes, uint32 words of eight nibbles. Returns the
// scale as F16 bits. As in metal-marlin, codes are computed with the scale before it is rounded.
// Requires: head_dim is a positive multiple of 8.
uint16_t encode_metal_marlin_linear_fp4(const float* row, int head_dim, uint8_t* words);
void decode_metal_marlin_linear_fp4(const uint8_t* words, uint16_t scale, int head_dim, float* row);

}  // namespace kvx::engines
