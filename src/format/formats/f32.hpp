// F32: binary32, as it is.
// row: [f32 x head_dim]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct F32 {
  using Codec = F32Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kF32,
      .name = "f32",
      .element = "F32",
      .element_bits = Codec::kBits,
      .group_sizes = {{1}, 1},
      .scale_types = {{ScaleType::kNone}, 1},
      .scale_rules = {{ScaleRule::kNone}, 1},
      .scale_sources = {{ScaleSource::kComputed}, 1},
      .has_tensor_scale = false,
      .packing = Packing::kBytes,
      .head_dim_multiple = 1,
      .summary = "binary32, as it is",
  };
};

}  // namespace kvx::format
