// decode_rows: stored rows of one head to f32 rows, for any format. The arithmetic is format/'s.
#pragma once

#include "format/affine.hpp"
#include "format/packing.hpp"
#include "format/spec.hpp"
#include "ops/cpu/facts_in_kernels.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Where a job's rows come from and go to, token by token.
struct DecodeRow {
  float* x;               // [head_dim]
  const uint8_t* codes;   // the row's packed codes
  const uint8_t* scales;  // of its group 0
};

// token counts inside the block.
KVX_INLINE DecodeRow decode_row(const DecodeJob& job, int token) {
  return {job.rows + int64_t{token - job.first_token} * job.head_dim,
          job.codes + token * job.token_stride, job.scales + token * job.scale_token_stride};
}

template <class Format>
KVX_INLINE void decode_plain(const DecodeJob& job) {
  using Codec = typename Format::Codec;
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = job.first_token; t < job.first_token + job.num_tokens; ++t) {
    const DecodeRow row = decode_row(job, t);
    format::unpack<Format::kFacts.packing>(row.codes, 0, job.head_dim, codes);
    format::decode_codes<Codec>(codes, job.head_dim, row.x);
  }
}

template <class Format, format::ScaleType T>
KVX_INLINE void decode_affine(const DecodeJob& job) {
  using Codec = typename Format::Codec;
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = job.first_token; t < job.first_token + job.num_tokens; ++t) {
    const DecodeRow row = decode_row(job, t);
    format::unpack<Format::kFacts.packing>(row.codes, 0, job.head_dim, codes);
    format::AffineParams params;
    memcpy(&params.scale, row.scales, 2);
    memcpy(&params.zero, row.scales + 2, 2);
    if (job.purpose == DecodeFor::kGather) {
      format::dequantize_affine<Codec, T>(params, codes, job.head_dim, row.x);
    } else {
      format::dequantize_affine_exact<Codec, T>(params, codes, job.head_dim, row.x);
    }
  }
}

// Size: numbers in a full group, 0 when only known at run time.
template <class Format, int Size>
void decode_symmetric(const DecodeJob& job) {
  using Codec = typename Format::Codec;
  const format::ScaleMaker maker = scale_maker<Format>(*job.spec, job.tensor_scale);
  const int size = Size != 0 ? Size : job.head_dim;
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = job.first_token; t < job.first_token + job.num_tokens; ++t) {
    const DecodeRow row = decode_row(job, t);
    format::unpack<Format::kFacts.packing>(row.codes, 0, job.head_dim, codes);
    format::decode_codes<Codec>(codes, job.head_dim, row.x);
    const uint8_t* scale = row.scales;
    int first = 0;
    for (; first + size <= job.head_dim; first += size, scale += job.scale_group_stride) {
      const float step = maker.step(format::load_scale(maker.type, scale));
      format::multiply_group(step, size, row.x + first);
    }
    if (first < job.head_dim) {  // the last group is shorter
      const float step = maker.step(format::load_scale(maker.type, scale));
      format::multiply_group(step, job.head_dim - first, row.x + first);
    }
  }
}

// Finds the spec's group size among those that the format has, so that the compiler knows it.
template <class Format, int Index = 0>
void decode_groups(const DecodeJob& job) {
  constexpr auto kSizes = Format::kFacts.group_sizes;
  if constexpr (Index + 1 < kSizes.count) {
    if (job.spec->group_size != kSizes.values[Index]) return decode_groups<Format, Index + 1>(job);
  }
  decode_symmetric<Format, kSizes.values[Index]>(job);
}

template <class Format>
void decode_rows(const DecodeJob& job) {
  using format::ScaleType;
  if constexpr (is_plain<Format>()) {
    decode_plain<Format>(job);
  } else if constexpr (is_affine<Format>()) {
    const bool is_f16 = job.spec->scale_type == ScaleType::kF16;
    is_f16 ? decode_affine<Format, ScaleType::kF16>(job)
           : decode_affine<Format, ScaleType::kBF16>(job);
  } else {
    decode_groups<Format>(job);
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
