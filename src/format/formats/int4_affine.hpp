// Int4Affine: TurboMind's 4-bit rows, code * scale + zero.
// row: [nibbles in TurboMind's order: head_dim / 2 bytes][scale: f16 or bf16][zero: the same]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Int4Affine {
  using Codec = UInt4Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kInt4Affine,
      .name = "int4_affine",
      .element = "UINT4",
      .element_bits = Codec::kBits,
      .group_sizes = {{kWholeRow}, 1},
      .scale_types = {{ScaleType::kF16, ScaleType::kBF16}, 2},
      .scale_rules = {{ScaleRule::kAffine}, 1},
      .scale_sources = {{ScaleSource::kComputed}, 1},
      .has_tensor_scale = false,
      .packing = Packing::kTurboMind,
      .head_dim_multiple = 8,
      .summary =
          "TurboMind's int4: code * scale + zero per token and head, in the parameters' type",
  };
};

}  // namespace kvx::format
