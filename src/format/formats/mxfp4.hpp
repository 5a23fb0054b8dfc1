// Mxfp4: OCP MXFP4, E2M1 with a power of two per 32.
// row: [nibbles: head_dim / 2 bytes][scale: e8m0 x head_dim / 32]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Mxfp4 {
  using Codec = E2M1Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kMxfp4,
      .name = "mxfp4",
      .element = "E2M1",
      .element_bits = Codec::kBits,
      .group_sizes = {{32}, 1},
      .scale_types = {{ScaleType::kE8M0}, 1},
      .scale_rules = {{ScaleRule::kE8M0Ceil, ScaleRule::kE8M0Floor}, 2},
      .scale_sources = {{ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kNibbles,
      .head_dim_multiple = 32,
      .summary = "OCP MXFP4: E2M1 with a power-of-two scale per 32",
  };
};

}  // namespace kvx::format
