// gather on a GPU: K and V of one run of heads in one launch.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/cuda/floats.cuh"
#include "ops/cuda/rows_launch.hpp"
#include "ops/gather/gather_chunks.cuh"
#include "ops/gather/gather_cuda.hpp"
#include "ops/segments.hpp"
#include "ops/side_rows.hpp"

namespace kvx::ops {
namespace cuda {
namespace {

// A warp a row, in shared memory: every head_dim and address.
__device__ void gather_row(const GatherParams& params, const GatherSide& part,
                           const GatherRange& range, int64_t token, int head, float* x, int lane) {
  const CudaSide& side = part.side;
  const GatherSource source = gather_source(
      params, part, range, token, block_of_token(params, range, token), lane == 0 && head == 0);
  if (!source.is_read) return;
  uint8_t* output = part.output_row(range.first_row + token, params.first_head + head);
  const RowSource from = source.row(side, head);
  if (part.keeps_bits) {
    for (int i = lane; i < side.code_bytes; i += kWarp) {
      output[i] = from.codes[byte_of_row(side.view.codes, i)];
    }
    return;
  }
  __syncwarp();
  decode_row(side, from, format::DecodeFor::kGather, x, lane);
  __syncwarp();
  undo_transform_row(gather_transform(params, part, head, source.position_block), x,
                     side.view.head_dim, lane);
  __syncwarp();
  for (int d = lane; d < side.view.head_dim; d += kWarp) {
    store_float(part.output.dtype, x[d], output, d);
  }
}

// blockIdx: rows of the range, the range, K or V.
__global__ void __launch_bounds__(RowsLaunch::kThreads)
    gather_rows(const __grid_constant__ GatherParams params) {
  extern __shared__ float shared[];
  const GatherSide& part = params.sides[blockIdx.z];
  const GatherRange range = range_at(params.ranges, static_cast<int>(blockIdx.y));
  if (!is_inside(params, range)) {
    const bool counts = blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0;
    if (counts) atomicAdd(&params.counters->out_of_range, 1ull);
    return;
  }
  if (!part.is_wanted()) return;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps_per_cta = RowsLaunch::kThreads / kWarp;
  float* x = shared + warp * part.side.view.head_dim;
  const int64_t num_rows = min(range.num_tokens, params.max_tokens) * params.num_heads;
  for (int64_t row = int64_t{blockIdx.x} * warps_per_cta + warp; row < num_rows;
       row += int64_t{gridDim.x} * warps_per_cta) {
    gather_row(params, part, range, row / params.num_heads,
               static_cast<int>(row % params.num_heads), x, lane);
  }
}

GatherSide gather_side(const SideView& side, const MutableFloatRows& output,
                       const SideTransform& transform) {
  if (side.head_dim == 0) return {};
  return {.side = cuda_side(side),
          .output = output,
          .transform = transform,
          .chunks = chunk_rows(side),
          .is_transformed = !transform.is_identity(),
          .keeps_bits = transform.is_identity() && stored_dtype(side.spec) == output.dtype};
}

bool fits(const GatherSide& part) {
  return part.side.view.head_dim == 0 || part.output.data == nullptr ||
         (fits_chunks(part.side.view) && fits_chunks(part.output));
}

Status launch_rows(const CudaContext& context, const GatherParams& params, unsigned num_ranges) {
  const int head_dim =
      std::max(params.sides[0].side.view.head_dim, params.sides[1].side.view.head_dim);
  const auto launch = RowsLaunch::of(params.max_tokens, params.num_heads, head_dim);
  const dim3 grid(ceil_div(launch.num_ctas, 2u), num_ranges, 2);
  gather_rows<<<grid, RowsLaunch::kThreads, launch.shared_bytes,
                static_cast<cudaStream_t>(context.stream)>>>(params);
  return device::cuda_launch_status("gather_rows");
}

Status launch_chunks(const CudaContext& context, const GatherParams& gather, unsigned num_ranges) {
  const int lanes =
      1 << std::max(gather.sides[0].chunks.log2_lanes, gather.sides[1].chunks.log2_lanes);
  const unsigned ctas = GatherWalks::num_ctas(context.device.num_multiprocessors, num_ranges,
                                              gather.max_tokens, gather.num_heads, lanes);
  const GatherChunksParams params = {gather, FastDivide(gather.num_heads)};
  return launch_overlapping(context, "gather_chunks", gather_chunks,
                            {dim3(ctas, num_ranges, 2), GatherWalks::kThreads}, params);
}

}  // namespace
}  // namespace cuda

Status gather(const CudaContext& context, const GatherArgs& args, int64_t max_tokens,
              DeviceCounters* counters) {
  return gather(context, args, {.count = std::ssize(args.ranges), .list = args.ranges.data()},
                max_tokens, counters);
}

Status gather(const CudaContext& context, const GatherArgs& args, const CudaGatherRanges& ranges,
              int64_t max_tokens, DeviceCounters* counters) {
  constexpr int64_t kMaxRanges = 65535;
  if (ranges.count > kMaxRanges) {
    return invalid_argument("num_ranges is {}; a call on CUDA takes at most {}", ranges.count,
                            kMaxRanges);
  }
  if (ranges.count == 0 || max_tokens == 0) return {};
  for (const HeadRun& run : args.cache.runs) {
    const cuda::GatherParams params = {
        .sides = {cuda::gather_side(run.k, args.k, args.transform.k),
                  cuda::gather_side(run.v, args.v, args.transform.v)},
        .first_head = run.first_head,
        .num_heads = run.num_heads,
        .num_kv_heads = args.cache.num_kv_heads,
        .num_blocks = args.cache.num_blocks,
        .block_size = args.cache.block_size,
        .by_block_size = cuda::FastDivide(args.cache.block_size),
        .table = args.block_table,
        .max_blocks_per_sequence = args.max_blocks_per_sequence,
        .num_sequences = args.num_sequences,
        .ranges = ranges,
        .max_tokens = max_tokens,
        .num_rows = args.num_rows,
        .counters = counters,
    };
    const auto num_ranges = static_cast<unsigned>(ranges.count);
    const bool by_chunks = cuda::fits(params.sides[0]) && cuda::fits(params.sides[1]) &&
                           max_tokens <= INT32_MAX / run.num_heads / cuda::kWarp;
    KVX_RETURN_IF_ERROR(by_chunks ? cuda::launch_chunks(context, params, num_ranges)
                                  : cuda::launch_rows(context, params, num_ranges));
  }
  if (args.cache.next_segment == nullptr || args.k.data == nullptr) return {};
  return gather(context, next_segment_of(args), ranges, max_tokens, counters);
}

}  // namespace kvx::ops
