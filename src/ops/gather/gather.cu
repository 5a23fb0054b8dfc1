// gather on a GPU: a warp decodes a row, undoes its transform and stores the caller's type.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/cuda/floats.cuh"
#include "ops/cuda/rows_launch.hpp"
#include "ops/cuda/transform_row.cuh"
#include "ops/gather/decode_row.cuh"
#include "ops/gather/gather_cuda.hpp"
#include "ops/side_rows.hpp"

namespace kvx::ops {
namespace cuda {
namespace {

struct GatherSide {
  CudaSide side;
  MutableFloatRows output;
  SideTransform transform;
  bool keeps_bits;  // the cache's own type, untransformed
};

struct GatherJob {
  GatherSide k;
  GatherSide v;
  int first_head;
  int num_heads;  // of the run
  int num_kv_heads;
  int64_t num_blocks;
  int block_size;
  BlockTable table;
  int64_t max_blocks_per_sequence;
  int num_sequences;
  CudaGatherRanges ranges;
  int64_t max_tokens;  // of a range
  int64_t num_rows;
  CudaFindings* findings;
};

// Sequence i whole; the others before it in the output.
__device__ GatherRange whole_sequence(const int32_t* seq_lens, int i) {
  GatherRange range = {i, 0, seq_lens[i], 0};
  for (int s = 0; s < i; ++s) range.first_row += max(seq_lens[s], 0);
  return range;
}

__device__ GatherRange range_at(const CudaGatherRanges& ranges, int i) {
  if (ranges.list) return ranges.list[i];
  if (!ranges.sequences) return whole_sequence(ranges.seq_lens, i);
  return {ranges.sequences[i], ranges.first_tokens[i], ranges.num_tokens[i], ranges.first_rows[i]};
}

__device__ bool is_inside(const GatherJob& job, const GatherRange& range) {
  const int64_t capacity = job.max_blocks_per_sequence * job.block_size;
  const bool is_known = range.sequence >= 0 && range.sequence < job.num_sequences;
  if (is_known && job.ranges.seq_lens) {
    const int64_t length = job.ranges.seq_lens[range.sequence];
    if (range.first_token > length || range.num_tokens > length - range.first_token) return false;
  }
  return is_known && range.first_token >= 0 && range.num_tokens >= 0 &&
         range.first_token <= capacity && range.num_tokens <= capacity - range.first_token &&
         range.first_row >= 0;
}

// A token of a range, and where its row goes.
struct GatherToken {
  int sequence;
  int64_t token;
  int64_t row;
};

__device__ void gather_row(const GatherJob& job, const GatherSide& part, const GatherToken& at,
                           int head, float* x, int lane) {
  const CudaSide& side = part.side;
  if (side.view.head_dim == 0 || part.output.data == nullptr) return;
  const int64_t position_block = at.token / job.block_size;
  const int64_t offset = at.token % job.block_size;
  const int64_t block = job.table.ids[at.sequence * job.table.row_stride + position_block];
  const bool is_outside =
      block < 0 || block >= job.num_blocks ||
      (part.transform.block_offset && position_block >= part.transform.num_offset_blocks);
  if (is_outside) {
    if (lane == 0 && head == 0) atomicAdd(&job.findings->out_of_range, 1ull);
    return;
  }
  uint8_t* output = part.output.data + (at.row * part.output.token_stride +
                                        (job.first_head + head) * part.output.head_stride) *
                                           bytes_of(part.output.dtype);
  const uint8_t* codes = side.codes(block, offset, head);
  if (part.keeps_bits) {
    for (int i = lane; i < side.code_bytes; i += kWarp) output[i] = codes[i];
    return;
  }
  __syncwarp();
  decode_row(side, {codes, side.scales(block, offset, head), side.tensor_scale(head)},
             cpu::DecodeFor::kGather, x, lane);
  __syncwarp();
  undo_transform_row(transform_row(part.transform, job.first_head + head, job.num_kv_heads,
                                   side.view.head_dim, position_block),
                     x, side.view.head_dim, lane);
  __syncwarp();
  for (int d = lane; d < side.view.head_dim; d += kWarp) {
    store_float(part.output.dtype, x[d], output, d);
  }
}

// blockIdx.y: the range.
__global__ void __launch_bounds__(RowsLaunch::kThreads)
    gather_rows(const __grid_constant__ GatherJob job) {
  extern __shared__ float shared[];
  const GatherRange range = range_at(job.ranges, blockIdx.y);
  if (!is_inside(job, range)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(&job.findings->out_of_range, 1ull);
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps_per_cta = RowsLaunch::kThreads / kWarp;
  float* x = shared + warp * max(job.k.side.view.head_dim, job.v.side.view.head_dim);
  const int64_t num_rows = min(range.num_tokens, job.max_tokens) * 2 * job.num_heads;
  for (int64_t row = int64_t{blockIdx.x} * warps_per_cta + warp; row < num_rows;
       row += int64_t{gridDim.x} * warps_per_cta) {
    const int64_t token = row / (2 * job.num_heads);
    const int in_token = static_cast<int>(row % (2 * job.num_heads));
    const bool is_key = in_token < job.num_heads;
    gather_row(job, is_key ? job.k : job.v,
               {range.sequence, range.first_token + token, range.first_row + token},
               is_key ? in_token : in_token - job.num_heads, x, lane);
  }
}

GatherSide gather_side(const SideView& side, const MutableFloatRows& output,
                       const SideTransform& transform) {
  return {cuda_side(side), output, transform,
          side.head_dim > 0 && transform.is_identity() && stored_dtype(side.spec) == output.dtype};
}

}  // namespace
}  // namespace cuda

Status gather(const CudaContext& context, const GatherArgs& args, int64_t max_tokens,
              CudaFindings* findings) {
  return gather(context, args, {.count = std::ssize(args.ranges), .list = args.ranges.data()},
                max_tokens, findings);
}

Status gather(const CudaContext& context, const GatherArgs& args, const CudaGatherRanges& ranges,
              int64_t max_tokens, CudaFindings* findings) {
  constexpr int64_t kMaxRanges = 65535;
  if (ranges.count > kMaxRanges) {
    return invalid_argument("{} ranges are asked for; a call on CUDA takes at most {}",
                            ranges.count, kMaxRanges);
  }
  if (ranges.count == 0 || max_tokens == 0) return {};
  for (const HeadRun& run : args.cache.runs) {
    const auto launch =
        cuda::RowsLaunch::of(max_tokens, run.num_heads, std::max(run.k.head_dim, run.v.head_dim));
    const cuda::GatherJob job = {
        .k = cuda::gather_side(run.k, args.k, args.transform.k),
        .v = cuda::gather_side(run.v, args.v, args.transform.v),
        .first_head = run.first_head,
        .num_heads = run.num_heads,
        .num_kv_heads = args.cache.num_kv_heads,
        .num_blocks = args.cache.num_blocks,
        .block_size = args.cache.block_size,
        .table = args.block_table,
        .max_blocks_per_sequence = args.max_blocks_per_sequence,
        .num_sequences = args.num_sequences,
        .ranges = ranges,
        .max_tokens = max_tokens,
        .num_rows = launch.num_rows,
        .findings = findings,
    };
    const dim3 grid(launch.num_ctas, static_cast<unsigned>(ranges.count));
    cuda::gather_rows<<<grid, cuda::RowsLaunch::kThreads, launch.shared_bytes,
                        static_cast<cudaStream_t>(context.stream)>>>(job);
    KVX_RETURN_IF_ERROR(device::cuda_launch_status("gather"));
  }
  return {};
}

}  // namespace kvx::ops
