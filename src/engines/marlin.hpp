// Converters to and from the 4-bit bytes of RESMP-DEV/metal-marlin, whose INT4 kernels read offset
// binary and whose Python cache calls a linear code "fp4".
#pragma once

#include <cstdint>
#include <span>

namespace kvx::engines {

// metal-marlin's INT4 nibble is value + 8; int4_row's is two's complement (C-20). Each is the other
// with the top bit of every nibble flipped, so one function converts both ways, in place. Any
// packing of two nibbles a byte. A zero-filled buffer is all -8 in offset binary.
void swap_twos_complement_and_offset_binary(std::span<uint8_t> packed_nibbles);

// metal-marlin's Python "fp4": not E2M1 but q - 8 halves of the scale, q in 0..15, in [-4, 3.5]
// scales although the scale is amax / 6, so that the largest numbers clip by up to 42 %. Its bytes
// mean something else to its own Metal kernel, which reads E2M1 (as fp4_row stores it).
//
// row: [head_dim], finite; words: [head_dim / 2] bytes, uint32 words of eight nibbles. Returns the
// scale as F16 bits. Codes are made with the scale before it is rounded, as metal-marlin does.
// Requires: head_dim is a positive multiple of 8.
uint16_t encode_metal_marlin_linear_fp4(const float* row, int head_dim, uint8_t* words);
void decode_metal_marlin_linear_fp4(const uint8_t* words, uint16_t scale, int head_dim, float* row);

}  // namespace kvx::engines
