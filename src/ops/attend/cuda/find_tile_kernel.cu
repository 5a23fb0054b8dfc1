// find_tile_kernel: from formats to the compiled instance.
#include "ops/attend/cuda/tile_pairs.hpp"

namespace kvx::ops::cuda {

using format::FormatId;

TileKernel find_tile_kernel(FormatId k, FormatId v, const TileTraits& traits) {
  const bool is_exact = has_exact_tiles(traits.key_dim, traits.value_dim);
  if (!is_exact && !fits_padded_tiles(traits.key_dim, traits.value_dim)) return {};
#define KVX_FIND_TILE_PAIR(K, V)                                              \
  if (k == FormatId::K && v == FormatId::V) {                                 \
    return is_exact ? tile_instance<FormatId::K, FormatId::V>(traits)         \
                    : padded_tile_instance<FormatId::K, FormatId::V>(traits); \
  }
  KVX_FOR_EACH_TILE_PAIR(KVX_FIND_TILE_PAIR)
#undef KVX_FIND_TILE_PAIR
  return {};
}

}  // namespace kvx::ops::cuda
