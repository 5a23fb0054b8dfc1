// The formats that the tensor cores' kernel knows: how each decodes and where its scales go.
#pragma once

#include "ops/attend/cuda/tiles.cuh"

namespace kvx::ops::cuda {

template <format::FormatId Id, int Dim>
struct TileFormat;

#define KVX_TILE_FORMAT(Id, ElementType, ScaleType) \
  template <int Dim>                                \
  struct TileFormat<format::FormatId::Id, Dim> {    \
    using Element = ElementType;                    \
    using Scale = ScaleType;                        \
  }
KVX_TILE_FORMAT(kBF16, TileBf16, NoScale);
KVX_TILE_FORMAT(kF16, TileF16, NoScale);
KVX_TILE_FORMAT(kFp8E4M3, TileE4M3, RowF32);
KVX_TILE_FORMAT(kFp8E5M2, TileE5M2, RowF32);
KVX_TILE_FORMAT(kInt8, TileInt8, GroupF16<Dim>);
KVX_TILE_FORMAT(kInt4, TileInt4, GroupF16<Dim>);
KVX_TILE_FORMAT(kInt8Affine, TileUInt8, RowAffine);
KVX_TILE_FORMAT(kInt4Affine, TileUInt4, RowAffine);
#undef KVX_TILE_FORMAT

// A comma in a macro's argument needs a name.
template <int Dim>
struct TileFormat<format::FormatId::kNvfp4, Dim> {
  using Element = TileE2M1;
  using Scale = OperandScale<Dim, 16, FromE4M3>;
};
template <int Dim>
struct TileFormat<format::FormatId::kMxfp4G16, Dim> {
  using Element = TileE2M1;
  using Scale = OperandScale<Dim, 16, FromE8M0>;
};
template <int Dim>
struct TileFormat<format::FormatId::kMxfp4, Dim> {
  using Element = TileE2M1;
  using Scale = OperandScale<Dim, 32, FromE8M0>;
};

// The instance for K, V and both head_dims; one of these in each instance file.
template <format::FormatId K, format::FormatId V, int Dim>
TileKernel tile_kernel_of() {
  using KeyFormat = TileFormat<K, Dim>;
  using ValueFormat = TileFormat<V, Dim>;
  using Keys = TileKeys<typename KeyFormat::Element, typename KeyFormat::Scale, Dim>;
  using Values = TileValues<typename ValueFormat::Element, typename ValueFormat::Scale, Dim>;
  return tile_kernel<Keys, Values, Dim>();
}

}  // namespace kvx::ops::cuda

// Defines the instances of a pair of formats.
#define KVX_TILE_INSTANCES(K, V)                                                               \
  template <>                                                                                  \
  TileKernel tile_instance<format::FormatId::K, format::FormatId::V>(int head_dim) {           \
    if (head_dim == 64) return tile_kernel_of<format::FormatId::K, format::FormatId::V, 64>(); \
    return tile_kernel_of<format::FormatId::K, format::FormatId::V, 128>();                    \
  }
