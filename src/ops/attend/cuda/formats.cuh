// The types that decode each format in the tensor core kernels, beside the facts of formats.hpp. A
// format that only the reference kernel reads has none, so that an instance for it does not
// compile.
#pragma once

#include "format/list.hpp"
#include "ops/attend/cuda/common/decode_codes.cuh"
#include "ops/attend/cuda/common/tile_scales.cuh"
#include "ops/attend/cuda/formats.hpp"

namespace kvx::ops::cuda {

template <format::FormatId Id>
struct FormatTraits;

template <>
struct FormatTraits<format::FormatId::kBF16> {
  using Element = TileBf16;
};
template <>
struct FormatTraits<format::FormatId::kF16> {
  using Element = TileF16;
};
template <>
struct FormatTraits<format::FormatId::kFp8E4M3> {
  using Element = TileE4M3;
};
template <>
struct FormatTraits<format::FormatId::kFp8E5M2> {
  using Element = TileE5M2;
};
template <>
struct FormatTraits<format::FormatId::kInt8> {
  using Element = TileInt8;
};
template <>
struct FormatTraits<format::FormatId::kInt4> {
  using Element = TileInt4;
};
template <>
struct FormatTraits<format::FormatId::kInt8Affine> {
  using Element = TileUInt8;
};
template <>
struct FormatTraits<format::FormatId::kInt4Affine> {
  using Element = TileUInt4;
};

// E2M1 and integers under one scale a row: eight codes of a word lie as nibbles do.
template <>
struct FormatTraits<format::FormatId::kFp4Row> {
  using Element = TileE2M1;
};
template <>
struct FormatTraits<format::FormatId::kInt4Row> {
  using Element = TileInt4;
};

// E2M1. Keys, Values and Tile make f16 numbers of scales: for decode_mma's keys and values, and for
// prefill's tiles; Interleaved: of codes in interleaved order, which decode to smaller numbers.
template <>
struct FormatTraits<format::FormatId::kNvfp4> {
  using Element = TileE2M1;
  using DecodeMmaElement = TileE2M1UnderE4M3;
  using Keys = FromE4M3;
  using Values = FromE4M3;
  using Tile = FromE4M3;
  struct Interleaved {
    using Keys = FromE4M3;
    using Values = FromE4M3Raised;
    using Tile = FromE4M3Raised;
  };
};
template <>
struct FormatTraits<format::FormatId::kMxfp4G16> {
  using Element = TileE2M1;
  using DecodeMmaElement = TileE2M1;
  using Keys = FromE8M0;
  using Values = FromE8M0;
  using Tile = FromE8M0;
  struct Interleaved {
    using Keys = FromE8M0Raised<6>;
    using Values = FromE8M0Raised<6>;
    using Tile = FromE8M0Raised<6>;
  };
};
template <>
struct FormatTraits<format::FormatId::kMxfp4> {
  using Element = TileE2M1;
  using DecodeMmaElement = TileE2M1;
  using Keys = FromE8M0;
  using Values = FromE8M0Raised<0>;  // they multiply weights, which may be 2^8
  using Tile = FromE8M0;
  struct Interleaved {
    using Keys = FromE8M0Raised<6>;
    using Values = FromE8M0Raised<0>;
    using Tile = FromE8M0Raised<6>;
  };
};

// The facts of formats.hpp, of the format itself and of its decoder are one.
template <class Format>
constexpr bool agrees_with_table() {
  constexpr format::FormatId kId = Format::kFacts.id;
  constexpr TensorCoreFormat kFormat = tensor_core_format(kId);
  if constexpr (kFormat.is_supported()) {
    static_assert(kFormat.bits == 4 || kFormat.bits == 8 || kFormat.bits == 16,
                  "the tensor core kernels have no decoder for this width");
    static_assert(kFormat.bits == Format::kFacts.element_bits);
    static_assert(kFormat.bits == FormatTraits<kId>::Element::kBits);
    static_assert(kFormat.bits == 16 || kFormat.scale_path == ScalePath::kRowF16 ||
                  has_prefill_decoder(kId));
    static_assert((kFormat.bits == 16) == (kFormat.scale_path == ScalePath::kNone));
  }
  return true;
}
#define KVX_CHECK_TABLE(Format) static_assert(agrees_with_table<format::Format>());
KVX_FOR_EACH_FORMAT(KVX_CHECK_TABLE)
#undef KVX_CHECK_TABLE

}  // namespace kvx::ops::cuda
