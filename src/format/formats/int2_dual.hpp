// Int2Dual: 2-bit integers of whole blocks, with a scale per token and a step and a zero per
// channel. The channels' part of a block lies behind its rows (format/dual_scale.hpp). row: [2-bit
// codes: head_dim / 4 bytes][scale: e4m3]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Int2Dual {
  using Codec = UInt2Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kInt2Dual,
      .name = "int2_dual",
      .element = "UINT2",
      .element_bits = Codec::kBits,
      .group_sizes = {{kWholeRow}, 1},
      .scale_types = {{ScaleType::kE4M3}, 1},
      .scale_rules = {{ScaleRule::kDual}, 1},
      .scale_sources = {{ScaleSource::kComputed}, 1},
      .has_tensor_scale = false,
      .packing = Packing::kQuarters,
      .head_dim_multiple = 64,
      .summary = "whole blocks: a scale a token, an e4m3 step and an int8 zero a channel",
      .kernels = Kernels::kReference,
  };
};

}  // namespace kvx::format
