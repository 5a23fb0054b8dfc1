// Nvfp4: E2M1 with an E4M3 scale per 16 under an f32 tensor scale per layer and KV head.
// row: [nibbles: head_dim / 2 bytes][scale: e4m3 x head_dim / 16]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Nvfp4 {
  using Codec = E2M1Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kNvfp4,
      .name = "nvfp4",
      .element = "E2M1",
      .element_bits = Codec::kBits,
      .group_sizes = {{16}, 1},
      .scale_types = {{ScaleType::kE4M3}, 1},
      .scale_rules = {{ScaleRule::kAmax}, 1},
      .scale_sources = {{ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = true,
      .packing = Packing::kNibbles,
      .head_dim_multiple = 16,
      .summary = "E2M1 with an E4M3 scale per 16 under one f32 tensor scale",
  };
};

}  // namespace kvx::format
