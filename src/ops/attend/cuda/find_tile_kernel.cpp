// find_tile_kernel: from formats to the compiled instance; and its launch.
#include "ops/attend/cuda/job.hpp"
#include "ops/attend/cuda/tile_pairs.hpp"
#include "ops/cuda/overlapping_launch.cuh"

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

TileKernel find_cell_instance(FormatId k, FormatId v, const TileTraits& traits) {
  if (k != v || !has_exact_tiles(traits.key_dim, traits.value_dim)) return {};
#define KVX_FIND_CELL_FORMAT(Id) \
  if (k == FormatId::Id) return cell_tile_instance<FormatId::Id>(traits);
  KVX_FOR_EACH_CELL_FORMAT(KVX_FIND_CELL_FORMAT)
#undef KVX_FIND_CELL_FORMAT
  return {};
}

}  // namespace

TileKernel find_tile_kernel(FormatId k, FormatId v, const TileTraits& traits) {
  if (!fits_padded_tiles(traits.key_dim, traits.value_dim)) return {};
  if (traits.in_cells) return find_cell_instance(k, v, traits);
#define KVX_FIND_TILE_PAIR(K, V)                            \
  if (k == FormatId::K && v == FormatId::V) {               \
    return find_instance<FormatId::K, FormatId::V>(traits); \
  }
  KVX_FOR_EACH_TILE_PAIR(KVX_FIND_TILE_PAIR)
#undef KVX_FIND_TILE_PAIR
  return {};
}

cudaError_t launch_attend_tiles(const CudaContext& context, const TileKernel& kernel,
                                int warps_of_cta, const AttendJob& job) {
  const int shared_bytes = warps_of_cta * kernel.warp_shared_bytes;
  const cudaError_t set = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (set != cudaSuccess) return set;
  const auto heads =
      static_cast<unsigned>(job.packed.num_heads / job.heads_of_cta * job.num_row_tiles);
  const dim3 grid = job.balanced_pieces > 0
                        ? dim3(static_cast<unsigned>(job.balanced_pieces) * heads)
                        : dim3(job.num_splits, heads, job.args.num_sequences);
  return launch_overlapping(context, kernel.function, {grid, warps_of_cta * kWarp, shared_bytes},
                            &job);
}

}  // namespace kvx::ops::cuda
