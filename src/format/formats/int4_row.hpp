// Int4Row: 4-bit integers in uint32 words of eight under one scale a row (metal-marlin's design).
// row: [uint32 words of eight nibbles: head_dim / 2 bytes][scale: f16 or f32]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Int4Row {
  using Codec = Int4Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kInt4Row,
      .name = "int4_row",
      .element = "INT4",
      .element_bits = Codec::kBits,
      .group_sizes = {{kWholeRow}, 1},
      .scale_types = {{ScaleType::kF16, ScaleType::kF32}, 2},
      .scale_rules = {{ScaleRule::kAmax}, 1},
      .scale_sources = {{ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kWords,
      .head_dim_multiple = 8,
      .summary = "symmetric 4-bit integers in uint32 words of eight, one scale a row",
  };
};

}  // namespace kvx::format
