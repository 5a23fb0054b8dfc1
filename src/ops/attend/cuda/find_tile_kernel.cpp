// find_tile_kernel: from formats to the compiled instance; and its launch.
#include <map>
#include <mutex>
#include <tuple>

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

// All that a CTA may have: what is allowed belongs to the kernel, and other threads launch it too.
cudaError_t allow_shared_bytes(const CudaContext& context, const TileKernel& kernel) {
  return cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              context.device.shared_bytes_per_cta);
}

int ask_clusters_at_once(const CudaContext& context, const TileKernel& kernel, int warps_of_cta,
                         int ctas) {
  const int shared_bytes = warps_of_cta * kernel.warp_shared_bytes;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, static_cast<unsigned>(ctas), 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1, static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(warps_of_cta * kWarp));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  // Every device with clusters takes eight CTAs in one; it is asked about more.
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  int num_clusters = 0;
  if (allowed == cudaSuccess && allow_shared_bytes(context, kernel) == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&num_clusters, kernel.function, &config) == cudaSuccess) {
    return num_clusters;
  }
  cudaGetLastError();  // not sticky: the next call shall not see it
  return 0;
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

int clusters_at_once(const CudaContext& context, const TileKernel& kernel, int warps_of_cta,
                     int ctas) {
  if (device::cuda_code_version(context.device, kernel.function) < 90) return 0;
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int, int>, int>
      known;  // asking costs a launch's time
  const std::tuple key(context.device.index, kernel.function, warps_of_cta, ctas);
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace(key, 0);
  if (is_new) found->second = ask_clusters_at_once(context, kernel, warps_of_cta, ctas);
  return found->second;
}

cudaError_t launch_attend_tiles(const CudaContext& context, const TileKernel& kernel,
                                int warps_of_cta, const AttendJob& job) {
  const int shared_bytes = warps_of_cta * kernel.warp_shared_bytes;
  const cudaError_t set = allow_shared_bytes(context, kernel);
  if (set != cudaSuccess) return set;
  const auto heads =
      static_cast<unsigned>(job.packed.num_heads / job.heads_of_cta * job.num_row_tiles);
  const dim3 grid = job.balanced_pieces > 0
                        ? dim3(static_cast<unsigned>(job.balanced_pieces) * heads)
                        : dim3(heads, job.num_splits, job.args.num_sequences);
  const int ctas_of_cluster = job.merges_in_cluster ? int{job.num_splits} : 1;
  return launch_overlapping(context, kernel.function,
                            {grid, warps_of_cta * kWarp, shared_bytes, ctas_of_cluster}, &job);
}

}  // namespace kvx::ops::cuda
