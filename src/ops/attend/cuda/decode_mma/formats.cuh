// The instances of decode_mma: which decoders and scales each pair of formats is compiled with.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ops/attend/cuda/decode_mma/kernel.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"
#include "ops/attend/cuda/formats.cuh"

namespace kvx::ops::cuda {

// The scales of a row, by where they enter. From: of ScalePath::kOperand (formats.cuh).
template <ScalePath Path, int Dim, int Group, class From>
struct RowScalesOfPath;
template <int Dim, int Group, class From>
struct RowScalesOfPath<ScalePath::kNone, Dim, Group, From> {
  using Type = NoScale;
};
template <int Dim, int Group, class From>
struct RowScalesOfPath<ScalePath::kRow, Dim, Group, From> {
  using Type = RowF32;
};
template <int Dim, int Group, class From>
struct RowScalesOfPath<ScalePath::kRowF16, Dim, Group, From> {
  using Type = RowF16;
};
template <int Dim, int Group, class From>
struct RowScalesOfPath<ScalePath::kGroups64, Dim, Group, From> {
  using Type = GroupF16<Dim>;
};
template <int Dim, int Group, class From>
struct RowScalesOfPath<ScalePath::kAffine, Dim, Group, From> {
  using Type = RowAffine;
};
template <int Dim, int Group, class From>
struct RowScalesOfPath<ScalePath::kOperand, Dim, Group, From> {
  using Type = OperandScale<Dim, Group, From>;
};
template <format::FormatId Id, int Dim, class From = void>
using RowScalesOf = typename RowScalesOfPath<tensor_core_format(Id).scale_path, Dim,
                                             tensor_core_format(Id).operand_group, From>::Type;

template <format::FormatId Id, int Dim>
struct TileFormat {
  using Element = typename FormatTraits<Id>::Element;
  using KeyScale = RowScalesOf<Id, Dim>;
  using ValueScale = KeyScale;
};
template <format::FormatId Id, int Dim>
requires(tensor_core_format(Id).scale_path == ScalePath::kOperand) struct TileFormat<Id, Dim> {
  using Element = typename FormatTraits<Id>::DecodeMmaElement;
  using KeyScale = RowScalesOf<Id, Dim, typename FormatTraits<Id>::Keys>;
  using ValueScale = RowScalesOf<Id, Dim, typename FormatTraits<Id>::Values>;
};

// E2M1 in interleaved order.
template <format::FormatId Id, int Dim>
struct TileFormatInterleaved {
  using KeyScale = RowScalesOf<Id, Dim, typename FormatTraits<Id>::Interleaved::Keys>;
  using ValueScale = RowScalesOf<Id, Dim, typename FormatTraits<Id>::Interleaved::Values>;
};

// fp8 under one scale a head: it multiplies scores and sums outside the loop.
template <class Scale>
struct WithoutSharedScale {
  using Type = Scale;
};
template <>
struct WithoutSharedScale<RowF32> {
  using Type = NoScale;
};

// SharedScales: of fp8. Padded: rows may be shorter than Dim; query rows go in eights. WordScales:
// RowWord.
template <format::FormatId K, format::FormatId V, int Dim, bool Bulk, bool SharedScales,
          bool Padded = false, bool WordScales = false>
DecodeMmaKernel decode_mma_kernel_of(const TileTraits& traits) {
  using KeyFormat = TileFormat<K, Dim>;
  using ValueFormat = TileFormat<V, Dim>;
  using KeyScale = std::conditional_t<WordScales, RowWord, typename KeyFormat::KeyScale>;
  using ValueScale = std::conditional_t<WordScales, RowWord, typename ValueFormat::ValueScale>;
  using Shared = WithoutSharedScale<KeyScale>;
  using SharedV = WithoutSharedScale<ValueScale>;
  using KeyChoice = std::conditional_t<SharedScales, typename Shared::Type, KeyScale>;
  using ValueChoice = std::conditional_t<SharedScales, typename SharedV::Type, ValueScale>;
  using Keys = TileKeys<typename KeyFormat::Element, KeyChoice, Dim, Bulk, Padded>;
  using Values = TileValues<typename ValueFormat::Element, ValueChoice, Dim, Bulk, Padded>;
  // fp8 beside full-precision window mostly has given scales; padded instances take all of them.
  constexpr bool kIs16Bits = KeyFormat::Element::kBits == 16 && ValueFormat::Element::kBits == 16;
  constexpr bool kAcceptsFullPrecision =
      !kIs16Bits && (Padded || SharedScales || !std::is_same_v<KeyScale, RowF32> ||
                     !std::is_same_v<ValueScale, RowF32>);
  constexpr int kMostNTiles = Padded ? 1 : 2;
  DecodeMmaKernel kernel =
      traits.has_many_rows
          ? decode_mma_kernel<Keys, Values, Dim, kMostNTiles, kAcceptsFullPrecision>()
          : decode_mma_kernel<Keys, Values, Dim, 1, kAcceptsFullPrecision>();
  kernel.shares_scales = SharedScales;
  return kernel;
}

// E2M1 in interleaved order: a pool's, in bulk copies, with ends in bf16.
template <format::FormatId Id, int Dim>
DecodeMmaKernel tile_kernel_interleaved(const TileTraits& traits) {
  using Format = TileFormatInterleaved<Id, Dim>;
  using Keys = TileKeys<TileE2M1Interleaved, typename Format::KeyScale, Dim, true, false>;
  using Values = TileValues<TileE2M1Interleaved, typename Format::ValueScale, Dim, true, false>;
  if (!traits.has_dense_rows) return {};
  return traits.has_many_rows ? decode_mma_kernel<Keys, Values, Dim, 2, true>()
                              : decode_mma_kernel<Keys, Values, Dim, 1, true>();
}

// Rows of four bits come in bulk copies where they lie so: with half the bytes, copying them 16 at
// a time would cost as many instructions as decoding them.
template <format::FormatId K, format::FormatId V, int Dim>
DecodeMmaKernel decode_mma_kernel_for_dim(const TileTraits& traits) {
  using Key = TileFormat<K, Dim>;
  using Value = TileFormat<V, Dim>;
  if constexpr (Key::Element::kBits == 4 && Value::Element::kBits == 4) {
    return traits.has_dense_rows ? decode_mma_kernel_of<K, V, Dim, true, false>(traits)
                                 : decode_mma_kernel_of<K, V, Dim, false, false>(traits);
  } else if constexpr (std::is_same_v<typename Key::KeyScale, RowF32>) {
    return traits.has_shared_scales ? decode_mma_kernel_of<K, V, Dim, false, true>(traits)
                                    : decode_mma_kernel_of<K, V, Dim, false, false>(traits);
  } else {
    return decode_mma_kernel_of<K, V, Dim, false, false>(traits);
  }
}

}  // namespace kvx::ops::cuda

// Defines the instances of a pair of formats.
#define KVX_TILE_INSTANCES(K, V)                                                        \
  template <>                                                                           \
  DecodeMmaKernel tile_instance<format::FormatId::K, format::FormatId::V>(              \
      const TileTraits& traits) {                                                       \
    constexpr auto kKey = format::FormatId::K;                                          \
    constexpr auto kValue = format::FormatId::V;                                        \
    return traits.key_dim == 64 ? decode_mma_kernel_for_dim<kKey, kValue, 64>(traits)   \
                                : decode_mma_kernel_for_dim<kKey, kValue, 128>(traits); \
  }

// The same for E2M1 in interleaved order, K and V alike.
#define KVX_INTERLEAVED_TILE_INSTANCES(Id)                                                    \
  template <>                                                                                 \
  DecodeMmaKernel interleaved_tile_instance<format::FormatId::Id>(const TileTraits& traits) { \
    constexpr auto kId = format::FormatId::Id;                                                \
    return traits.key_dim == 64 ? tile_kernel_interleaved<kId, 64>(traits)                    \
                                : tile_kernel_interleaved<kId, 128>(traits);                  \
  }

// The same for rows whose scales are words, K and V alike.
#define KVX_WORD_SCALE_INSTANCES(Id)                                                       \
  template <>                                                                              \
  DecodeMmaKernel word_scale_instance<format::FormatId::Id>(const TileTraits& traits) {    \
    constexpr auto kId = format::FormatId::Id;                                             \
    if (has_exact_tiles(traits.key_dim, traits.value_dim)) {                               \
      return traits.key_dim == 64                                                          \
                 ? decode_mma_kernel_of<kId, kId, 64, false, false, false, true>(traits)   \
                 : decode_mma_kernel_of<kId, kId, 128, false, false, false, true>(traits); \
    }                                                                                      \
    return std::max(traits.key_dim, traits.value_dim) <= 128                               \
               ? decode_mma_kernel_of<kId, kId, 128, false, false, true, true>(traits)     \
               : decode_mma_kernel_of<kId, kId, 256, false, false, true, true>(traits);    \
  }

// The same for rows of up to 128 or 256 numbers.
#define KVX_PADDED_TILE_INSTANCES(K, V)                                               \
  template <>                                                                         \
  DecodeMmaKernel padded_tile_instance<format::FormatId::K, format::FormatId::V>(     \
      const TileTraits& traits) {                                                     \
    constexpr auto kKey = format::FormatId::K;                                        \
    constexpr auto kValue = format::FormatId::V;                                      \
    return std::max(traits.key_dim, traits.value_dim) <= 128                          \
               ? decode_mma_kernel_of<kKey, kValue, 128, false, false, true>(traits)  \
               : decode_mma_kernel_of<kKey, kValue, 256, false, false, true>(traits); \
  }
