// Fp8E5M2: OCP E5M2 bytes under one f32 scale.
// row: [code: 1 byte x head_dim]; computed scales add [scale: f32]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Fp8E5M2 {
  using Codec = E5M2Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kFp8E5M2,
      .name = "fp8_e5m2",
      .element = "E5M2",
      .element_bits = Codec::kBits,
      .group_sizes = {{kWholeRow}, 1},
      .scale_types = {{ScaleType::kF32}, 1},
      .scale_rules = {{ScaleRule::kAmax}, 1},
      .scale_sources = {{ScaleSource::kGiven, ScaleSource::kComputed, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kBytes,
      .head_dim_multiple = 1,
      .summary = "OCP E5M2; one f32 scale, given per tensor or head, or computed per row",
  };
};

}  // namespace kvx::format
