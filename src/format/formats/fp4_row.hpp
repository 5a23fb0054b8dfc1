// Fp4Row: E2M1 in uint32 words of eight under one scale a row (metal-marlin's design).
// row: [uint32 words of eight nibbles: head_dim / 2 bytes][scale: f16 or f32]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Fp4Row {
  using Codec = E2M1Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kFp4Row,
      .name = "fp4_row",
      .element = "E2M1",
      .element_bits = Codec::kBits,
      .group_sizes = {{kWholeRow}, 1},
      .scale_types = {{ScaleType::kF16, ScaleType::kF32}, 2},
      .scale_rules = {{ScaleRule::kAmax}, 1},
      .scale_sources = {{ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kWords,
      .head_dim_multiple = 8,
      .summary = "E2M1 in uint32 words of eight, one scale a row",
  };
};

}  // namespace kvx::format
