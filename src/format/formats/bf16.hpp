// BF16: the upper half of binary32.
// row: [bf16 x head_dim]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct BF16 {
  using Codec = BF16Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kBF16,
      .name = "bf16",
      .element = "BF16",
      .element_bits = Codec::kBits,
      .group_sizes = {{1}, 1},
      .scale_types = {{ScaleType::kNone}, 1},
      .scale_rules = {{ScaleRule::kNone}, 1},
      .scale_sources = {{ScaleSource::kComputed}, 1},
      .has_tensor_scale = false,
      .packing = Packing::kBytes,
      .head_dim_multiple = 1,
      .summary = "the upper half of binary32",
  };
};

}  // namespace kvx::format
