// Int4Dual: 4-bit integers of whole blocks, with a scale per token and a step and a zero per
// channel. The channels' part of a block lies behind its rows (format/dual_scale.hpp). row:
// [nibbles: head_dim / 2 bytes][scale: e4m3]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Int4Dual {
  using Codec = UInt4Codec;
  static constexpr Facts kFacts = {
      .id = FormatId::kInt4Dual,
      .name = "int4_dual",
      .element = "UINT4",
      .element_bits = Codec::kBits,
      .group_sizes = {{kWholeRow}, 1},
      .scale_types = {{ScaleType::kE4M3}, 1},
      .scale_rules = {{ScaleRule::kDual}, 1},
      .scale_sources = {{ScaleSource::kComputed}, 1},
      .has_tensor_scale = false,
      .packing = Packing::kNibbles,
      .head_dim_multiple = 64,
      .summary = "whole blocks: a scale a token, an e4m3 step and an int8 zero a channel",
      .kernels = Kernels::kReference,
  };
};

}  // namespace kvx::format
