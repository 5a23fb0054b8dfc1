// find_tile_kernel: from formats to the compiled instance.
#include "ops/attend/cuda/tile_pairs.hpp"

namespace kvx::ops::cuda {

using format::FormatId;

namespace {

template <FormatId K, FormatId V>
TileKernel find_instance(const TileTraits& traits) {
  if (has_exact_tiles(traits.key_dim, traits.value_dim)) {
    const TileKernel kernel = tile_instance<K, V>(traits);
    if (kernel.takes_wide || !traits.has_wide_ends) return kernel;
  }
  return padded_tile_instance<K, V>(traits);
}

}  // namespace

TileKernel find_tile_kernel(FormatId k, FormatId v, const TileTraits& traits) {
  if (!fits_padded_tiles(traits.key_dim, traits.value_dim)) return {};
#define KVX_FIND_TILE_PAIR(K, V)                            \
  if (k == FormatId::K && v == FormatId::V) {               \
    return find_instance<FormatId::K, FormatId::V>(traits); \
  }
  KVX_FOR_EACH_TILE_PAIR(KVX_FIND_TILE_PAIR)
#undef KVX_FIND_TILE_PAIR
  return {};
}

}  // namespace kvx::ops::cuda
