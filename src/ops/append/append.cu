// append on a GPU: K and V of one run of heads in one launch, a warp a row.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/append/encode_row.cuh"
#include "ops/cuda/floats.cuh"
#include "ops/cuda/rows_launch.hpp"
#include "ops/cuda/transform_row.cuh"
#include "ops/side_rows.hpp"

namespace kvx::ops {
namespace cuda {
namespace {

struct AppendSide {
  CudaSide side;
  FloatRows input;
  SideTransform transform;
  bool keeps_bits;  // the cache's own type, untransformed
};

struct AppendJob {
  AppendSide k;
  AppendSide v;
  int first_head;
  int num_heads;  // of the run
  int num_kv_heads;
  int64_t num_slots;
  int block_size;
  const int64_t* slot_mapping;  // [num_tokens]
  const int64_t* positions;     // [num_tokens], or null
  int64_t num_rows;
  CudaFindings* findings;
};

__device__ void copy_bits(const uint8_t* from, int num_bytes, uint8_t* to, int lane) {
  for (int i = lane; i < num_bytes; i += kWarp) to[i] = from[i];
}

__device__ void append_row(const AppendJob& job, const AppendSide& part, int64_t token, int head,
                           float* x, int lane) {
  const CudaSide& side = part.side;
  if (side.view.head_dim == 0 || side.view.is_alias) return;
  const int64_t slot = job.slot_mapping[token];
  if (slot < 0) return;
  const int64_t position_block =
      part.transform.block_offset ? job.positions[token] / job.block_size : 0;
  const bool is_outside =
      slot >= job.num_slots ||
      (part.transform.block_offset &&
       (job.positions[token] < 0 || position_block >= part.transform.num_offset_blocks));
  if (is_outside) {
    if (lane == 0 && head == 0) atomicAdd(&job.findings->out_of_range, 1ull);
    return;
  }
  const int64_t block = slot / job.block_size;
  const int64_t offset = slot % job.block_size;
  const uint8_t* input = part.input.data + (token * part.input.token_stride +
                                            (job.first_head + head) * part.input.head_stride) *
                                               bytes_of(part.input.dtype);
  if (part.keeps_bits) {
    return copy_bits(input, side.code_bytes, side.codes(block, offset, head), lane);
  }
  __syncwarp();
  for (int d = lane; d < side.view.head_dim; d += kWarp) {
    x[d] = load_float(part.input.dtype, input, d);
  }
  apply_transform_row(transform_row(part.transform, job.first_head + head, job.num_kv_heads,
                                    side.view.head_dim, position_block),
                      x, side.view.head_dim, lane);
  const RowTarget to = {side.codes(block, offset, head), side.scales(block, offset, head),
                        side.tensor_scale(head)};
  const int counted = encode_row(side, to, x, lane);
  if (counted > 0)
    atomicAdd(&job.findings->nonfinite_inputs, static_cast<unsigned long long>(counted));
}

__global__ void __launch_bounds__(RowsLaunch::kThreads)
    append_rows(const __grid_constant__ AppendJob job) {
  extern __shared__ float shared[];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps_per_cta = RowsLaunch::kThreads / kWarp;
  float* x = shared + warp * max(job.k.side.view.head_dim, job.v.side.view.head_dim);
  for (int64_t row = int64_t{blockIdx.x} * warps_per_cta + warp; row < job.num_rows;
       row += int64_t{gridDim.x} * warps_per_cta) {
    const int64_t token = row / (2 * job.num_heads);
    const int in_token = static_cast<int>(row % (2 * job.num_heads));
    const bool is_key = in_token < job.num_heads;
    append_row(job, is_key ? job.k : job.v, token, is_key ? in_token : in_token - job.num_heads, x,
               lane);
  }
}

AppendSide append_side(const SideView& side, const FloatRows& input,
                       const SideTransform& transform) {
  return {cuda_side(side), input, transform,
          side.head_dim > 0 && transform.is_identity() && stored_dtype(side.spec) == input.dtype};
}

Status check_can_append(const SideView& side) {
  if (side.head_dim == 0 || side.spec.scale_source != format::ScaleSource::kPageShared) return {};
  return unsupported("{} with page-shared scales: append on CUDA computes a scale for each row",
                     side.spec.facts->name);
}

}  // namespace
}  // namespace cuda

Status append(const CudaContext& context, const AppendArgs& args, CudaFindings* findings) {
  for (const HeadRun& run : args.cache.runs) {
    KVX_RETURN_IF_ERROR(cuda::check_can_append(run.k));
    KVX_RETURN_IF_ERROR(cuda::check_can_append(run.v));
  }
  const bool needs_positions = args.transform.k.block_offset || args.transform.v.block_offset;
  if (needs_positions && args.positions.size() < args.slot_mapping.size()) {
    return invalid_argument("positions has {} entries; a block_offset transform needs {}",
                            args.positions.size(), args.slot_mapping.size());
  }
  if (args.slot_mapping.empty()) return {};
  for (const HeadRun& run : args.cache.runs) {
    const auto launch = cuda::RowsLaunch::of(std::ssize(args.slot_mapping), run.num_heads,
                                             std::max(run.k.head_dim, run.v.head_dim));
    const cuda::AppendJob job = {
        .k = cuda::append_side(run.k, args.k, args.transform.k),
        .v = cuda::append_side(run.v, args.v, args.transform.v),
        .first_head = run.first_head,
        .num_heads = run.num_heads,
        .num_kv_heads = args.cache.num_kv_heads,
        .num_slots = args.cache.num_blocks * args.cache.block_size,
        .block_size = args.cache.block_size,
        .slot_mapping = args.slot_mapping.data(),
        .positions = args.positions.data(),
        .num_rows = launch.num_rows,
        .findings = findings,
    };
    cuda::append_rows<<<launch.num_ctas, cuda::RowsLaunch::kThreads, launch.shared_bytes,
                        static_cast<cudaStream_t>(context.stream)>>>(job);
    KVX_RETURN_IF_ERROR(device::cuda_launch_status("append"));
  }
  return {};
}

}  // namespace kvx::ops
