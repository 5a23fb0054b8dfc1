// Int4: symmetric 4-bit integers in groups along head_dim.
// row: [nibbles: head_dim / 2 bytes][scale: f16 or f32 x ceil(head_dim / group_size)]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Int4 {
  using Codec = Int4Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kInt4,
      .name = "int4",
      .element = "INT4",
      .element_bits = Codec::kBits,
      .group_sizes = {{64, 32, 128}, 3},
      .scale_types = {{ScaleType::kF16, ScaleType::kF32}, 2},
      .scale_rules = {{ScaleRule::kAmax}, 1},
      .scale_sources = {{ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kNibbles,
      .head_dim_multiple = 2,
      .summary = "symmetric, two's complement in [-7, 7], one scale a group",
  };
};

}  // namespace kvx::format
