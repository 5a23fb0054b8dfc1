// find_tile_kernel: from formats to the compiled instance.
#include "ops/attend/cuda/tile_pairs.hpp"

namespace kvx::ops::cuda {

TileKernel find_tile_kernel(format::FormatId k, format::FormatId v, const TileTraits& traits) {
  if (traits.head_dim != 64 && traits.head_dim != 128) return {};
#define KVX_FIND_TILE_PAIR(K, V)                                            \
  if (k == format::FormatId::K && v == format::FormatId::V) {               \
    return tile_instance<format::FormatId::K, format::FormatId::V>(traits); \
  }
  KVX_FOR_EACH_TILE_PAIR(KVX_FIND_TILE_PAIR)
#undef KVX_FIND_TILE_PAIR
  return {};
}

}  // namespace kvx::ops::cuda
