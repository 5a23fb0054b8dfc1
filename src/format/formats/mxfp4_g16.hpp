// Mxfp4G16: E2M1 with a power of two per 16 (LMDeploy's and SGLang's; not OCP's MXFP4).
// row: [nibbles: head_dim / 2 bytes][scale: e8m0 x head_dim / 16]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Mxfp4G16 {
  using Codec = E2M1Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kMxfp4G16,
      .name = "mxfp4_g16",
      .element = "E2M1",
      .element_bits = Codec::kBits,
      .group_sizes = {{16}, 1},
      .scale_types = {{ScaleType::kE8M0}, 1},
      .scale_rules = {{ScaleRule::kE8M0Ceil}, 1},
      .scale_sources = {{ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kNibbles,
      .head_dim_multiple = 16,
      .summary = "E2M1 with a power-of-two scale per 16; not OCP's MXFP4, whose groups are 32",
  };
};

}  // namespace kvx::format
