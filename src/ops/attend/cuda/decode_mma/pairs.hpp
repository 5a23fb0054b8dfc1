// The pairs of K's and V's formats for which decode_mma is compiled. Each has its
// instances in a file of instances/; a missing one is a link error.
#pragma once

#include "ops/attend/cuda/common/launch.hpp"

// WORD(K, V)
#define KVX_FOR_EACH_TILE_PAIR(WORD) \
  WORD(kBF16, kBF16)                 \
  WORD(kF16, kF16)                   \
  WORD(kFp8E4M3, kFp8E4M3)           \
  WORD(kFp8E5M2, kFp8E5M2)           \
  WORD(kInt8, kInt8)                 \
  WORD(kInt4, kInt4)                 \
  WORD(kInt8Affine, kInt8Affine)     \
  WORD(kInt4Affine, kInt4Affine)     \
  WORD(kMxfp4G16, kMxfp4G16)         \
  WORD(kMxfp4, kMxfp4)               \
  WORD(kNvfp4, kNvfp4)               \
  WORD(kFp4Row, kFp4Row)             \
  WORD(kInt4Row, kInt4Row)           \
  WORD(kInt8, kInt4)                 \
  WORD(kFp8E4M3, kNvfp4)             \
  WORD(kBF16, kInt4)

// Formats whose codes may lie in interleaved order (format/interleaved.hpp). WORD(Id)
#define KVX_FOR_EACH_INTERLEAVED_FORMAT(WORD) \
  WORD(kMxfp4G16)                             \
  WORD(kMxfp4)                                \
  WORD(kNvfp4)

// Formats with one scale a row that may also be a word, or half of one (RowWord). WORD(Id)
#define KVX_FOR_EACH_WORD_SCALE_FORMAT(WORD) \
  WORD(kFp4Row)                              \
  WORD(kInt4Row)

// Dual-scale formats, blocks of 64 or 128 tokens in bulk copies: all pairs, since a budget of bits
// chooses K's and V's width by layer and head. WORD(K, V)
#define KVX_FOR_EACH_DUAL_PAIR(WORD) \
  WORD(kInt2Dual, kInt2Dual)         \
  WORD(kInt2Dual, kInt3Dual)         \
  WORD(kInt2Dual, kInt4Dual)         \
  WORD(kInt3Dual, kInt2Dual)         \
  WORD(kInt3Dual, kInt3Dual)         \
  WORD(kInt3Dual, kInt4Dual)         \
  WORD(kInt4Dual, kInt2Dual)         \
  WORD(kInt4Dual, kInt3Dual)         \
  WORD(kInt4Dual, kInt4Dual)

namespace kvx::ops::cuda {

// Whether instances of dual-scale formats are made for these head_dims, beside has_exact_tiles.
constexpr bool has_long_dual_tiles(int key_dim, int value_dim) {
  return key_dim == value_dim && (key_dim == 192 || key_dim == 256);
}

// Requires: has_exact_tiles.
template <format::FormatId K, format::FormatId V>
DecodeMmaKernel tile_instance(const TileTraits& traits);
// The same for rows of other lengths. Requires: fits_padded_tiles.
template <format::FormatId K, format::FormatId V>
DecodeMmaKernel padded_tile_instance(const TileTraits& traits);

// The same for K and V under scales that are words. Requires: fits_padded_tiles.
template <format::FormatId Id>
DecodeMmaKernel word_scale_instance(const TileTraits& traits);
// The same for K and V in interleaved order. Requires: has_exact_tiles.
template <format::FormatId Id>
DecodeMmaKernel interleaved_tile_instance(const TileTraits& traits);

// Requires: has_exact_tiles.
template <format::FormatId K, format::FormatId V>
DecodeMmaKernel dual_instance(const TileTraits& traits);
// The same for rows of 192 and 256 numbers. Requires: has_long_dual_tiles.
template <format::FormatId K, format::FormatId V>
DecodeMmaKernel long_dual_instance(const TileTraits& traits);

#define KVX_DECLARE_TILE_PAIR(K, V)                                               \
  template <>                                                                     \
  DecodeMmaKernel tile_instance<format::FormatId::K, format::FormatId::V>(        \
      const TileTraits& traits);                                                  \
  template <>                                                                     \
  DecodeMmaKernel padded_tile_instance<format::FormatId::K, format::FormatId::V>( \
      const TileTraits& traits);
KVX_FOR_EACH_TILE_PAIR(KVX_DECLARE_TILE_PAIR)
#undef KVX_DECLARE_TILE_PAIR
#define KVX_DECLARE_DUAL_PAIR(K, V)                                             \
  template <>                                                                   \
  DecodeMmaKernel dual_instance<format::FormatId::K, format::FormatId::V>(      \
      const TileTraits& traits);                                                \
  template <>                                                                   \
  DecodeMmaKernel long_dual_instance<format::FormatId::K, format::FormatId::V>( \
      const TileTraits& traits);
KVX_FOR_EACH_DUAL_PAIR(KVX_DECLARE_DUAL_PAIR)
#undef KVX_DECLARE_DUAL_PAIR
#define KVX_DECLARE_INTERLEAVED_FORMAT(Id) \
  template <>                              \
  DecodeMmaKernel interleaved_tile_instance<format::FormatId::Id>(const TileTraits& traits);
KVX_FOR_EACH_INTERLEAVED_FORMAT(KVX_DECLARE_INTERLEAVED_FORMAT)
#undef KVX_DECLARE_INTERLEAVED_FORMAT

}  // namespace kvx::ops::cuda
