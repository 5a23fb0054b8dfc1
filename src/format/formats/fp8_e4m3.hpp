// Fp8E4M3: OCP E4M3FN bytes under one f32 scale, or one for each 128 of them.
// row: [code: 1 byte x head_dim]; computed scales add [scale: f32 x groups]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Fp8E4M3 {
  using Codec = E4M3Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kFp8E4M3,
      .name = "fp8_e4m3",
      .element = "E4M3",
      .element_bits = Codec::kBits,
      .group_sizes = {{kWholeRow, 128}, 2},
      .scale_types = {{ScaleType::kF32}, 1},
      .scale_rules = {{ScaleRule::kAmax}, 1},
      .scale_sources = {{ScaleSource::kGiven, ScaleSource::kComputed, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kBytes,
      .head_dim_multiple = 1,
      .summary =
          "OCP E4M3FN; one f32 scale, given per tensor or head, or computed per row or group",
  };
};

}  // namespace kvx::format
