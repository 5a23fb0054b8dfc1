"""Int3 as docs/howto/add-a-format.md adds it: what goes into each file, and what refuses a tree that
lacks a part of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One addition to a file. Leaving it out is an error where `refused_by` is compiled."""

    file: str
    after: str | None  # occurs once in the file; None: the file is new
    text: str
    refused_by: str


INT3_HPP = """// Int3: symmetric 3-bit integers in groups along head_dim.
// row: [triples: 3 * head_dim / 8 bytes][scale: f32 or f16 x ceil(head_dim / group_size)]
#pragma once

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

struct Int3 {
  using Codec = SignedCodec<3>;
  static constexpr Facts kFacts = {
      .id = FormatId::kInt3,
      .name = "int3",
      .element = "INT3",
      .element_bits = Codec::kBits,
      .group_sizes = {{32, 64}, 2},
      .scale_types = {{ScaleType::kF32, ScaleType::kF16}, 2},
      .scale_rules = {{ScaleRule::kAmax}, 1},
      .scale_sources = {{ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}, 3},
      .has_tensor_scale = false,
      .packing = Packing::kTriples,
      .head_dim_multiple = 8,
      .summary = "symmetric, two's complement in [-3, 3], one scale a group",
      .kernels = Kernels::kReference,
  };
};

}  // namespace kvx::format
"""

# Eight codes lie in 24 bits, the first in the lowest.
PACK = """  } else if constexpr (P == Packing::kTriples) {
    uint8_t* out = row + first * 3 / 8;
    for (int i = 0; i < n; i += 8, out += 3) {
      uint32_t bits = 0;
      for (int j = 0; j < 8; ++j) bits |= static_cast<uint32_t>(codes[i + j]) << (3 * j);
      for (int b = 0; b < 3; ++b) out[b] = static_cast<uint8_t>(bits >> (8 * b));
    }
"""
UNPACK = """  } else if constexpr (P == Packing::kTriples) {
    const uint8_t* in = row + first * 3 / 8;
    for (int i = 0; i < n; i += 8, in += 3) {
      const uint32_t bits = in[0] | (uint32_t{in[1]} << 8) | (uint32_t{in[2]} << 16);
      for (int j = 0; j < 8; ++j) codes[i + j] = static_cast<Code>((bits >> (3 * j)) & 7u);
    }
"""

FACTS = "src/format/facts.hpp"
PACKING = "src/format/packing.hpp"
LIST = "src/format/list.hpp"
SPEC = "src/format/spec.cpp"
SCALAR = "src/ops/cpu/isa/scalar/level_scalar.cpp"

PARTS = [
    Part(FACTS, "  kInt2Dual,\n", "  kInt3,\n", SPEC),
    Part(FACTS, "  kTurboMind,\n", "  kTriples,  // three bytes of eight 3-bit codes\n", SPEC),
    Part(FACTS, '      return "TurboMind u4";\n',
         '    case Packing::kTriples:\n      return "triples";\n', SPEC),
    Part(PACKING, "    case Packing::kWords:\n    case Packing::kTurboMind:\n      return 8;\n",
         "    case Packing::kTriples:\n      return 8;\n", SPEC),
    Part(PACKING, "    case Packing::kTurboMind:\n      return bits == 4;\n",
         "    case Packing::kTriples:\n      return bits == 3;\n", SPEC),
    Part(PACKING, "codes[e] | (codes[e + 2] << 4));\n      }\n    }\n", PACK, SCALAR),
    Part(PACKING, "codes[e + 2] = in[i / 2 + b] >> 4;\n      }\n    }\n", UNPACK, SCALAR),
    Part("src/format/formats/int3.hpp", None, INT3_HPP, SPEC),
    Part(LIST, '#include "format/formats/int4.hpp"\n', '#include "format/formats/int3.hpp"\n', SPEC),
    Part(LIST, "  APPLY(WORD, Int2Dual, INT2_DUAL)", " \\\n  APPLY(WORD, Int3, INT3)", SPEC),
    Part("include/kvx/kvx_abi.h", "  KVX_FORMAT_INT2_DUAL = 17", ",\n  KVX_FORMAT_INT3 = 18",
         "src/api/checks/format_spec.cpp"),
    Part("src/kv/recipe.cpp", "    case FormatId::kInt4Affine:\n", "    case FormatId::kInt3:\n",
         "src/kv/recipe.cpp"),
]
