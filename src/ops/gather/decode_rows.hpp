// decode_rows: stored rows of one head to f32 rows, for any format. The arithmetic is format/'s.
#pragma once

#include "format/affine.hpp"
#include "format/packing.hpp"
#include "format/spec.hpp"
#include "format/traits.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "ops/cpu/level.hpp"
#include "ops/gather/decode_dual.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Where a run's rows come from and go to, token by token.
struct DecodeRow {
  float* x;               // [head_dim]
  const uint8_t* codes;   // the row's packed codes
  const uint8_t* scales;  // of its group 0
};

// token counts inside the block.
KVX_INLINE DecodeRow decode_row(const DecodeParams& params, int token) {
  return {params.rows + int64_t{token - params.first_token} * params.head_dim,
          params.codes + token * params.token_stride,
          params.scales + token * params.scale_token_stride};
}

template <class Format>
KVX_INLINE void decode_plain(const DecodeParams& params) {
  using Codec = typename Format::Codec;
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const DecodeRow row = decode_row(params, t);
    format::unpack<Format::kFacts.packing>(row.codes, 0, params.head_dim, codes);
    format::decode_codes<Codec>(codes, params.head_dim, row.x);
  }
}

template <class Format, format::ScaleType T>
KVX_INLINE void decode_affine(const DecodeParams& params) {
  using Codec = typename Format::Codec;
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const DecodeRow row = decode_row(params, t);
    format::unpack<Format::kFacts.packing>(row.codes, 0, params.head_dim, codes);
    format::AffineParams affine;
    memcpy(&affine.scale, row.scales, 2);
    memcpy(&affine.zero, row.scales + 2, 2);
    if (params.purpose == format::DecodeFor::kGather) {
      format::dequantize_affine<Codec, T>(affine, codes, params.head_dim, row.x);
    } else {
      format::dequantize_affine_exact<Codec, T>(affine, codes, params.head_dim, row.x);
    }
  }
}

// Size: numbers in a full group, 0 when it is known only at run time.
template <class Format, int Size>
void decode_symmetric(const DecodeParams& params) {
  using Codec = typename Format::Codec;
  const format::ScaleMaker maker = format::scale_maker<Format>(*params.spec, params.tensor_scale);
  const int size = Size != 0 ? Size : params.head_dim;
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const DecodeRow row = decode_row(params, t);
    format::unpack<Format::kFacts.packing>(row.codes, 0, params.head_dim, codes);
    format::decode_codes<Codec>(codes, params.head_dim, row.x);
    const uint8_t* scale = row.scales;
    int first = 0;
    for (; first + size <= params.head_dim; first += size, scale += params.scale_group_stride) {
      const float step = maker.step(format::load_scale(maker.type, scale));
      format::multiply_group(step, size, row.x + first);
    }
    if (first < params.head_dim) {  // the last group is shorter
      const float step = maker.step(format::load_scale(maker.type, scale));
      format::multiply_group(step, params.head_dim - first, row.x + first);
    }
  }
}

// Finds the spec's group size among those that the format has, so that it is a constant.
template <class Format, int Index = 0>
void decode_groups(const DecodeParams& params) {
  constexpr auto kSizes = Format::kFacts.group_sizes;
  if constexpr (Index + 1 < kSizes.count) {
    if (params.spec->group_size != kSizes.values[Index])
      return decode_groups<Format, Index + 1>(params);
  }
  decode_symmetric<Format, kSizes.values[Index]>(params);
}

template <class Format>
void decode_rows(const DecodeParams& params) {
  using format::ScaleType;
  if constexpr (format::is_plain<Format>()) {
    decode_plain<Format>(params);
  } else if constexpr (format::is_affine<Format>()) {
    const bool is_f16 = params.spec->scale_type == ScaleType::kF16;
    is_f16 ? decode_affine<Format, ScaleType::kF16>(params)
           : decode_affine<Format, ScaleType::kBF16>(params);
  } else if constexpr (format::is_dual<Format>()) {
    decode_dual<Format>(params);
  } else {
    decode_groups<Format>(params);
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
