// What the files of instances/ compile of dual-scale formats, a pair of K and V at a time.
#pragma once

#include "format/list.hpp"
#include "ops/attend/cuda/decode_mma/dual/keys.cuh"
#include "ops/attend/cuda/decode_mma/dual/values.cuh"
#include "ops/attend/cuda/decode_mma/kernel.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {

// More query rows than MostNTiles eights are work tiles of their own.
template <class Key, class Value, int Dim, int MostNTiles>
DecodeMmaKernel dual_kernel(const TileTraits& traits) {
  using Keys = DualKeys<Key::Codec::kBits, Dim>;
  using Values = DualValues<Value::Codec::kBits, Dim>;
  return traits.has_many_rows ? decode_mma_kernel<Keys, Values, Dim, MostNTiles, true>()
                              : decode_mma_kernel<Keys, Values, Dim, 1, true>();
}

#define KVX_DUAL_INSTANCE(K, V)                                                      \
  template <>                                                                        \
  DecodeMmaKernel dual_instance<format::FormatId::k##K, format::FormatId::k##V>(     \
      const TileTraits& traits) {                                                    \
    return traits.key_dim == 64 ? dual_kernel<format::K, format::V, 64, 2>(traits)   \
                                : dual_kernel<format::K, format::V, 128, 2>(traits); \
  }

// A second n-tile's sums beside the first one's are more than a thread's registers.
#define KVX_LONG_DUAL_INSTANCE(K, V)                                                  \
  template <>                                                                         \
  DecodeMmaKernel long_dual_instance<format::FormatId::k##K, format::FormatId::k##V>( \
      const TileTraits& traits) {                                                     \
    return traits.key_dim == 192 ? dual_kernel<format::K, format::V, 192, 1>(traits)  \
                                 : dual_kernel<format::K, format::V, 256, 1>(traits); \
  }

}  // namespace kvx::ops::cuda
