// F16: IEEE binary16.
// row: [f16 x head_dim]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct F16 {
  using Codec = F16Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kF16,
      .name = "f16",
      .element = "F16",
      .element_bits = Codec::kBits,
      .group_sizes = {{1}, 1},
      .scale_types = {{ScaleType::kNone}, 1},
      .scale_rules = {{ScaleRule::kNone}, 1},
      .scale_sources = {{ScaleSource::kComputed}, 1},
      .has_tensor_scale = false,
      .packing = Packing::kBytes,
      .head_dim_multiple = 1,
      .summary = "IEEE binary16",
  };
};

}  // namespace kvx::format
