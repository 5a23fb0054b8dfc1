// Int8Affine: TurboMind's 8-bit rows, code * scale + zero.
// row: [code: 1 byte x head_dim][scale: f16 or bf16][zero: the same]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Int8Affine {
  using Codec = UInt8Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kInt8Affine,
      .name = "int8_affine",
      .element = "UINT8",
      .element_bits = Codec::kBits,
      .group_sizes = {{kWholeRow}, 1},
      .scale_types = {{ScaleType::kF16, ScaleType::kBF16}, 2},
      .scale_rules = {{ScaleRule::kAffine}, 1},
      .scale_sources = {{ScaleSource::kComputed}, 1},
      .has_tensor_scale = false,
      .packing = Packing::kBytes,
      .head_dim_multiple = 1,
      .summary =
          "TurboMind's int8: code * scale + zero per token and head, in the parameters' type",
  };
};

}  // namespace kvx::format
