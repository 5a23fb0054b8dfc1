// decode_row: a warp turns one stored row into numbers in shared memory. The arithmetic is
// format/'s.
#pragma once

#include "format/affine.hpp"
#include "format/packing.hpp"
#include "format/q4_0.hpp"
#include "format/traits.hpp"
#include "ops/cuda/fragments.cuh"
#include "ops/cuda/side.cuh"
#include "ops/cuda/visit_format.cuh"
#include "ops/gather/decode_dual.cuh"

namespace kvx::ops::cuda {

// Where a row lies.
struct RowSource {
  const uint8_t* codes;
  const uint8_t* scales;  // of its group 0
  float tensor_scale;
  const uint8_t* channels = nullptr;  // of its block, where the format is dual-scale
};

// What turns codes into numbers, group by group or once a row.
template <class Format>
struct RowDecoder {
  const CudaSide& side;
  const RowSource& from;
  format::DecodeFor purpose;

  // codes: n numbers of a group.
  __device__ void decode(const typename Format::Codec::Code* codes, int group, int n,
                         float* x) const {
    using Codec = typename Format::Codec;
    if constexpr (format::is_plain<Format>()) {
      format::decode_codes<Codec>(codes, n, x);
    } else if constexpr (format::is_affine<Format>()) {
      if (side.view.spec.scale_type == format::ScaleType::kF16) {
        decode_affine<format::ScaleType::kF16>(codes, n, x);
      } else {
        decode_affine<format::ScaleType::kBF16>(codes, n, x);
      }
    } else {
      const format::ScaleMaker maker =
          format::scale_maker<Format>(side.view.spec, from.tensor_scale);
      const uint8_t* scale = from.scales + group * side.view.scales.group_stride;
      const float step = maker.step(format::load_scale(maker.type, scale));
      format::dequantize_group<Codec>(step, codes, n, x);
    }
  }

  template <format::ScaleType T>
  __device__ void decode_affine(const typename Format::Codec::Code* codes, int n, float* x) const {
    using Codec = typename Format::Codec;
    format::AffineParams params;
    memcpy(&params.scale, from.scales, 2);
    memcpy(&params.zero, from.scales + 2, 2);
    if (purpose == format::DecodeFor::kGather) {
      format::dequantize_affine<Codec, T>(params, codes, n, x);
    } else {
      format::dequantize_affine_exact<Codec, T>(params, codes, n, x);
    }
  }
};

// Codes are unpacked eight at a time, which cuts no group (sizes are multiples of 8, or the row).
inline constexpr int kCodesAtOnce = 8;

// Codes [first, first + n) of a row in fragments.
template <class Format>
__device__ inline void unpack_fragments(const SideView& side, const uint8_t* row, int first, int n,
                                        typename Format::Codec::Code (&codes)[kCodesAtOnce]) {
  constexpr int kBits = Format::Codec::kBits;
  alignas(4) uint8_t bytes[kCodesAtOnce * kBits / 8];
  load_fragments(side.codes.fragment_bytes, side.codes.fragment_stride, row, first * kBits / 8,
                 n * kBits / 8, bytes);
  format::unpack<Format::kFacts.packing>(bytes, 0, n, codes);
}

// Codes [first, first + kCodesAtOnce) of a row.
template <class Format>
__device__ inline void unpack_codes(const SideView& side, const uint8_t* row, int first,
                                    typename Format::Codec::Code (&codes)[kCodesAtOnce]) {
  if (is_fragmented(side)) {
    return unpack_fragments<Format>(side, row, first, kCodesAtOnce, codes);
  }
  if constexpr (kMayHaveInterleaved<Format>) {
    if (side.is_interleaved) {
      uint32_t word;
      memcpy(&word, row + first / 2, 4);
      word = format::nibbles_from_interleaved(word);
      const auto* bytes = reinterpret_cast<const uint8_t*>(&word);
      return format::unpack<Format::kFacts.packing>(bytes, 0, kCodesAtOnce, codes);
    }
  }
  format::unpack<Format::kFacts.packing>(row, first, kCodesAtOnce, codes);
}

template <class Format>
__device__ inline void decode_row_of(const CudaSide& side, const RowSource& from,
                                     format::DecodeFor purpose, float* x, int lane) {
  static_assert(kCodesAtOnce % format::codes_packed_together(Format::kFacts.packing) == 0);
  const RowDecoder<Format> decoder{side, from, purpose};
  const int head_dim = side.view.head_dim;
  for (int first = lane * kCodesAtOnce; first < head_dim; first += kWarp * kCodesAtOnce) {
    typename Format::Codec::Code codes[kCodesAtOnce];
    float numbers[kCodesAtOnce];
    const int n = min(kCodesAtOnce, head_dim - first);
    const int group = first / side.group_length;
    if (n == kCodesAtOnce) {
      unpack_codes<Format>(side.view, from.codes, first, codes);
      decoder.decode(codes, group, kCodesAtOnce, numbers);
#pragma unroll
      for (int i = 0; i < kCodesAtOnce; ++i) x[first + i] = numbers[i];
    } else {
      if (is_fragmented(side.view)) {
        unpack_fragments<Format>(side.view, from.codes, first, n, codes);
      } else {
        format::unpack<Format::kFacts.packing>(from.codes, first, n, codes);
      }
      decoder.decode(codes, group, n, numbers);
      for (int i = 0; i < n; ++i) x[first + i] = numbers[i];
    }
  }
}

// A lane a block.
__device__ inline void decode_q4_0_row(const CudaSide& side, const RowSource& from, float* x,
                                       int lane) {
  for (int block = lane; block < side.num_groups; block += kWarp) {
    format::q4_0::decode(from.codes + block * side.view.codes.fragment_stride,
                         from.scales + block * side.view.scales.group_stride,
                         x + block * format::q4_0::kGroup);
  }
}

// x: [head_dim] in shared memory. The warp's other lanes see it after a __syncwarp.
__device__ inline void decode_row(const CudaSide& side, const RowSource& from,
                                  format::DecodeFor purpose, float* x, int lane) {
  if (holds_q4_0_blocks(side.view)) return decode_q4_0_row(side, from, x, lane);
  visit_any_format(side.id, [&]<class Format>() {
    if constexpr (format::is_dual<Format>()) {
      decode_dual_row<Format>(side.view.head_dim, from.codes, *from.scales, from.channels, x, lane);
    } else {
      decode_row_of<Format>(side, from, purpose, x, lane);
    }
  });
}

}  // namespace kvx::ops::cuda
