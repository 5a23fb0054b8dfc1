// The latent kernel (sm_90a): attention over rows that are both keys and values, 64 query rows of a
// KV head against a split of the tokens. One warpgroup copies rows, two multiply; the instances,
// and their launch.
#include "ops/attend/cuda/latent/produce.cuh"
#include "ops/attend/cuda/latent/produce_bytes.cuh"
#include "ops/attend/cuda/latent/produce_nibbles.cuh"
#include "ops/attend/cuda/latent/queries.cuh"
#include "ops/attend/cuda/latent/rows.cuh"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops::cuda {
namespace {

#ifdef KVX_HAS_WGMMA

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
  const LatentWorkTile work_tile = find_latent_work_tile<kLatentRows>(params);
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
  if (warp < Shape::producer_warps(Rows.bits)) {
    give_registers<Shape::producer_registers(Rows)>();
    if constexpr (Rows.bits == 4) {
      LatentNibbleProducer<Rows>(walk, ring, warp).run();
    } else if constexpr (Rows.bits == 8) {
      LatentByteProducer<Rows>(walk, ring, warp).run();
    } else {
      LatentProducer(walk, ring, warp).run();
    }
  } else {
    take_registers<Shape::consumer_registers(Rows)>();
    const int of_consumers = warp - Shape::producer_warps(Rows.bits);
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

// nvcc's stubs of kernels do not compile with a struct among the template's arguments.
template <class Mma, int Bits, LatentRest Rest>
__global__ void __launch_bounds__(LatentShape::threads(Bits), 1)
    attend_latent(const __grid_constant__ LatentParams params) {
  const bool is_merged = params.num_splits > 1 || params.balance.most_work_tiles > 0;
  if (!is_merged) let_later_launches_begin();
  wait_for_earlier_work();
#ifdef KVX_HAS_WGMMA
  attend_latent_of<Mma, LatentRows{Bits, Rest}>(params);
#endif
}

template <class Mma, int Bits, LatentRest Rest = LatentRest::kPacked>
LatentKernel latent_kernel() {
  return {.function = reinterpret_cast<const void*>(&attend_latent<Mma, Bits, Rest>),
          .rows = kLatentRows,
          .step_tokens = kLatentStepTokens,
          .threads = LatentShape::threads(Bits),
          .shared_bytes = LatentShape::bytes({Bits, Rest}) + LatentShape::kAlignment};
}

// The kernel for rows of packed codes.
template <int Bits>
LatentKernel packed_latent_kernel(const LatentFormats& formats) {
  using enum LatentRest;
  if (!formats.has_segments) return latent_kernel<MmaF16, Bits>();
  switch (formats.rest) {
    case format::FormatId::kBF16:
      return latent_kernel<MmaF16, Bits, kBf16>();
    case format::FormatId::kF16:
      return latent_kernel<MmaF16, Bits, kF16>();
    default:
      return {};
  }
}

}  // namespace

LatentKernel find_latent_kernel(const LatentFormats& formats) {
  switch (tensor_core_format(formats.id).bits) {
    case 4:
      return packed_latent_kernel<4>(formats);
    case 8:
      return packed_latent_kernel<8>(formats);
    case 16:
      if (formats.rest != formats.id) return {};
      return formats.id == format::FormatId::kBF16 ? latent_kernel<MmaBf16, 16>()
                                                   : latent_kernel<MmaF16, 16>();
    default:
      return {};
  }
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
