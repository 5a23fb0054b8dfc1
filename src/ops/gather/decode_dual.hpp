// decode_dual: stored rows of a dual-scale block to f32 rows. The arithmetic is
// format/dual_scale.hpp's.
#pragma once

#include "format/dual_scale.hpp"
#include "format/packing.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

template <int Bits>
KVX_INLINE void load_dual_channels(const uint8_t* channels, int head_dim, float* steps,
                                   float* offsets) {
  const float factor = format::dual_factor(channels);
  for (int c = 0; c < head_dim; ++c) {
    const auto channel = format::dual_channel<Bits>(channels[c], channels[head_dim + c], factor);
    steps[c] = channel.step;
    offsets[c] = channel.offset;
  }
}

template <class Format>
void decode_dual(const DecodeParams& params) {
  using Codec = typename Format::Codec;
  const int head_dim = params.head_dim;
  float steps[format::kMaxHeadDim];
  float offsets[format::kMaxHeadDim];
  load_dual_channels<Codec::kBits>(params.channels, head_dim, steps, offsets);
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    format::unpack<Format::kFacts.packing>(params.codes + t * params.token_stride, 0, head_dim,
                                           codes);
    const float scale = format::E4M3::decode(params.scales[t * params.scale_token_stride]);
    float* x = params.rows + int64_t{t - params.first_token} * head_dim;
    KVX_VECTOR_LOOP
    for (int c = 0; c < head_dim; ++c) {
      x[c] = format::dual_number(scale, {steps[c], offsets[c]}, Codec::decode(codes[c]));
    }
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
