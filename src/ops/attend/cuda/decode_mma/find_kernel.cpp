// find_decode_mma_kernel: from formats to the compiled instance; and its launch.
#include <map>
#include <mutex>
#include <tuple>

#include "device/cuda_kernel.hpp"
#include "ops/attend/cuda/common/params.hpp"
#include "ops/attend/cuda/decode_mma/pairs.hpp"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops::cuda {

using format::FormatId;

namespace {

template <FormatId K, FormatId V>
DecodeMmaKernel find_instance(const TileTraits& traits) {
  if (has_exact_tiles(traits.key_dim, traits.value_dim)) {
    const DecodeMmaKernel kernel = tile_instance<K, V>(traits);
    if (kernel.accepts_full_precision || !traits.has_full_precision_window) return kernel;
  }
  return padded_tile_instance<K, V>(traits);
}

DecodeMmaKernel find_interleaved_instance(FormatId k, FormatId v, const TileTraits& traits) {
  if (k != v || !has_exact_tiles(traits.key_dim, traits.value_dim)) return {};
#define KVX_FIND_INTERLEAVED_FORMAT(Id) \
  if (k == FormatId::Id) return interleaved_tile_instance<FormatId::Id>(traits);
  KVX_FOR_EACH_INTERLEAVED_FORMAT(KVX_FIND_INTERLEAVED_FORMAT)
#undef KVX_FIND_INTERLEAVED_FORMAT
  return {};
}

DecodeMmaKernel find_word_scale_instance(FormatId k, FormatId v, const TileTraits& traits) {
  if (k != v) return {};
#define KVX_FIND_WORD_SCALE_FORMAT(Id) \
  if (k == FormatId::Id) return word_scale_instance<FormatId::Id>(traits);
  KVX_FOR_EACH_WORD_SCALE_FORMAT(KVX_FIND_WORD_SCALE_FORMAT)
#undef KVX_FIND_WORD_SCALE_FORMAT
  return {};
}

template <FormatId K, FormatId V>
DecodeMmaKernel find_dual_instance_of(const TileTraits& traits) {
  if (has_exact_tiles(traits.key_dim, traits.value_dim)) return dual_instance<K, V>(traits);
  if (has_long_dual_tiles(traits.key_dim, traits.value_dim)) {
    return long_dual_instance<K, V>(traits);
  }
  return {};
}

DecodeMmaKernel find_dual_instance(FormatId k, FormatId v, const TileTraits& traits) {
#define KVX_FIND_DUAL_PAIR(K, V)                                    \
  if (k == FormatId::K && v == FormatId::V) {                       \
    return find_dual_instance_of<FormatId::K, FormatId::V>(traits); \
  }
  KVX_FOR_EACH_DUAL_PAIR(KVX_FIND_DUAL_PAIR)
#undef KVX_FIND_DUAL_PAIR
  return {};
}

// All that a CTA may have.
cudaError_t allow_shared_bytes(const CudaContext& context, const DecodeMmaKernel& kernel) {
  return device::allow_shared_bytes(context.device.index, kernel.function,
                                    context.device.shared_bytes_per_cta);
}

int query_clusters_at_once(const CudaContext& context, const DecodeMmaKernel& kernel,
                           int warps_of_cta, int ctas) {
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

DecodeMmaKernel find_decode_mma_kernel(FormatId k, FormatId v, const TileTraits& traits) {
  if (!fits_padded_tiles(traits.key_dim, traits.value_dim)) return {};
  if (traits.is_interleaved) return find_interleaved_instance(k, v, traits);
  if (traits.has_word_scales) return find_word_scale_instance(k, v, traits);
#define KVX_FIND_TILE_PAIR(K, V)                            \
  if (k == FormatId::K && v == FormatId::V) {               \
    return find_instance<FormatId::K, FormatId::V>(traits); \
  }
  KVX_FOR_EACH_TILE_PAIR(KVX_FIND_TILE_PAIR)
#undef KVX_FIND_TILE_PAIR
  return find_dual_instance(k, v, traits);
}

int clusters_at_once(const CudaContext& context, const DecodeMmaKernel& kernel, int warps_of_cta,
                     int ctas) {
  if (device::cuda_code_version(context.device, kernel.function) < 90) return 0;
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int, int>, int>
      known;  // asking costs a launch's time
  const std::tuple key(context.device.index, kernel.function, warps_of_cta, ctas);
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace(key, 0);
  if (is_new) found->second = query_clusters_at_once(context, kernel, warps_of_cta, ctas);
  return found->second;
}

cudaError_t launch_attend_decode_mma(const CudaContext& context, const DecodeMmaKernel& kernel,
                                     const LaunchGrid& grid, int warps_of_cta,
                                     const DecodeMmaParams& params) {
  const cudaError_t set = allow_shared_bytes(context, kernel);
  if (set != cudaSuccess) return set;
  const LaunchShape shape = {
      .grid = dim3(grid.x, grid.y, grid.z),
      .threads = warps_of_cta * kWarp,
      .shared_bytes = warps_of_cta * kernel.warp_shared_bytes,
      .ctas_of_cluster = params.merges_in_cluster ? int{params.num_splits} : 1,
  };
  return launch_overlapping(context, kernel.function, shape, &params);
}

}  // namespace kvx::ops::cuda
