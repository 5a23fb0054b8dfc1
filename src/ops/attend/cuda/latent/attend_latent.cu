// The latent kernel (sm_90a): attention over rows that are both keys and values, 64 query rows of a
// KV head against a split of the tokens. One warpgroup copies rows, two multiply; the instances,
// and their launch.
#include "ops/attend/cuda/common/balance.cuh"
#include "ops/attend/cuda/latent/produce.cuh"
#include "ops/attend/cuda/latent/produce_packed.cuh"
#include "ops/attend/cuda/latent/queries.cuh"
#include "ops/attend/cuda/latent/rows.cuh"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops::cuda {
namespace {

#ifdef KVX_HAS_WGMMA

// What this CTA's index says; num_splits is 0 where there is no such work tile.
__device__ LatentWorkTile find_latent_work_tile(const LatentParams& params) {
  LatentWorkTile found = {.partial = -1};
  int head_and_tile = static_cast<int>(blockIdx.x);
  if (params.balance.most_work_tiles > 0) {
    const int num_of_work_tile = params.balance.num_row_tiles * params.num_heads;
    const int work_tile = head_and_tile / num_of_work_tile;
    head_and_tile %= num_of_work_tile;
    const auto [sequence, work_tiles] = sequence_of_work_tile(params, work_tile);
    found.sequence = sequence;
    found.split = work_tile - work_tiles.first;
    found.num_splits = work_tiles.num;
    if (work_tiles.num > 0 && found.split == 0 && head_and_tile == 0 && threadIdx.x == 0)
      params.balance.of_sequences[sequence] = work_tiles;
    found.partial =
        balanced_partial(params.balance, params.num_heads, work_tile,
                         head_and_tile % params.num_heads, head_and_tile / params.num_heads);
  } else {
    found.sequence = static_cast<int>(blockIdx.z);
    found.split = static_cast<int>(blockIdx.y);
    found.num_splits = params.num_splits;
  }
  if (found.num_splits == 0) return found;
  found.shape = sequence_shape(params, found.sequence);
  found.kv_head = params.first_head + head_and_tile % params.num_heads;
  found.first_row = head_and_tile / params.num_heads * kLatentRows;
  found.num_rows = min(kLatentRows, found.shape.q_len * params.q_per_kv - found.first_row);
  return found;
}

__device__ LatentWalk walk_of(const LatentParams& params, const LatentWorkTile& work_tile) {
  const TokenRange seen =
      seen_by_rows(params, work_tile.shape, work_tile.first_row, work_tile.num_rows);
  const TokenRange tokens =
      split_of(seen, work_tile.num_splits, work_tile.split, kLatentStepTokens);
  const int first = tokens.begin / kLatentStepTokens * kLatentStepTokens;
  const int num_steps = tokens.begin == tokens.end
                            ? 0
                            : (tokens.end - first + kLatentStepTokens - 1) / kLatentStepTokens;
  return {
      .params = params,
      .table = params.block_table.ids + int64_t{work_tile.sequence} * params.block_table.row_stride,
      .head = work_tile.kv_head - params.first_head,
      .tokens = tokens,
      .num_steps = num_steps};
}

template <class Mma, LatentRows Rows, int Consumer>
__device__ __forceinline__ void consume(const LatentWalk& walk, const LatentRing& ring,
                                        const LatentWorkTile& work_tile, int warp) {
  LatentConsumer<Mma, Rows, Consumer> consumer(walk, ring, work_tile, warp);
  consumer.run();
  let_later_launches_begin();
  consumer.store();
}

template <class Mma, LatentRows Rows>
__device__ __forceinline__ void attend_latent_of(const LatentParams& params) {
  using Shape = LatentShape;
  extern __shared__ __align__(1024) uint8_t shared[];
  const LatentWorkTile work_tile = find_latent_work_tile(params);
  if (work_tile.num_splits == 0) return;
  if (!work_tile.shape.is_valid) {
    store_empty_rows(params, work_tile.shape, work_tile.kv_head, work_tile.first_row,
                     work_tile.num_rows, work_tile.split, work_tile.num_splits == 1);
    return;
  }
  if (work_tile.num_rows <= 0) return;
  const LatentWalk walk = walk_of(params, work_tile);
  const LatentRing ring(shared);
  if (threadIdx.x == 0) ring.begin(Rows);
  __syncthreads();

  // The same in all lanes, and the compiler sees that it is.
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp < Shape::kProducerWarps) {
    give_registers<Shape::producer_registers(decodes(Rows))>();
    if constexpr (decodes(Rows)) {
      LatentPackedProducer<Rows>(walk, ring, warp).run();
    } else {
      LatentProducer(walk, ring, warp).run();
    }
  } else {
    take_registers<Shape::consumer_registers(decodes(Rows))>();
    const int of_consumers = warp - Shape::kProducerWarps;
    LatentQueries<Mma, Rows>(params, work_tile.shape, work_tile.kv_head, work_tile.first_row,
                             work_tile.num_rows)
        .load(ring, of_consumers);
    wait_at(3, Shape::kConsumers * kWarpgroup);
    if (of_consumers < 4) {
      consume<Mma, Rows, 0>(walk, ring, work_tile, of_consumers);
    } else {
      consume<Mma, Rows, 1>(walk, ring, work_tile, of_consumers - 4);
    }
  }
}

#endif

template <class Mma, LatentRows Rows>
__global__ void __launch_bounds__(LatentShape::kThreads, 1)
    attend_latent(const __grid_constant__ LatentParams params) {
  const bool is_merged = params.num_splits > 1 || params.balance.most_work_tiles > 0;
  if (!is_merged) let_later_launches_begin();
  wait_for_earlier_work();
#ifdef KVX_HAS_WGMMA
  attend_latent_of<Mma, Rows>(params);
#endif
}

template <class Mma, LatentRows Rows>
LatentKernel latent_kernel() {
  return {.function = reinterpret_cast<const void*>(&attend_latent<Mma, Rows>),
          .threads = LatentShape::kThreads,
          .shared_bytes = LatentShape::bytes(Rows) + LatentShape::kAlignment};
}

}  // namespace

LatentKernel find_latent_kernel(const LatentFormats& formats) {
  using enum LatentRows;
  using format::FormatId;
  const TensorCoreFormat of_values = tensor_core_format(formats.id);
  if (!of_values.is_supported()) return {};
  if (of_values.bits < 16) {
    if (!formats.has_segments) return latent_kernel<MmaF16, kPacked>();
    if (formats.rest == FormatId::kBF16) return latent_kernel<MmaF16, kPackedBesideBf16>();
    if (formats.rest == FormatId::kF16) return latent_kernel<MmaF16, kPackedBesideF16>();
    return {};
  }
  if (formats.rest != formats.id) return {};
  return formats.id == FormatId::kBF16 ? latent_kernel<MmaBf16, kBits16>()
                                       : latent_kernel<MmaF16, kBits16>();
}

cudaError_t launch_attend_latent(const CudaContext& context, const LatentKernel& kernel,
                                 const LaunchGrid& grid, const LatentParams& params) {
  const cudaError_t set = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
  if (set != cudaSuccess) return set;
  return launch_overlapping(context, kernel.function,
                            {dim3(grid.x, grid.y, grid.z), kernel.threads, kernel.shared_bytes},
                            &params);
}

}  // namespace kvx::ops::cuda
