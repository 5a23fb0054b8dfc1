// Int8: symmetric 8-bit integers in groups along head_dim.
// row: [code: 1 byte x head_dim][scale: f16 or f32 x ceil(head_dim / group_size)]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Int8 {
  using Codec = Int8Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kInt8,
      .name = "int8",
      .element = "INT8",
      .element_bits = Codec::kBits,
      .group_sizes = {{64, 32, 128}, 3},
      .scale_types = {{ScaleType::kF16, ScaleType::kF32}, 2},
      .scale_rules = {{ScaleRule::kAmax}, 1},
      .scale_sources = {{ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kBytes,
      .head_dim_multiple = 1,
      .summary = "symmetric, two's complement in [-127, 127], one scale a group",
  };
};

}  // namespace kvx::format
