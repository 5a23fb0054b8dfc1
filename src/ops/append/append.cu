// append on a GPU: K and V of one run of heads in one launch, a warp a row.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/append/encode_quad.cuh"
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
  bool uses_quads;  // four neighbours a lane, without shared memory
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
  uint32_t num_rows;
  CudaFindings* findings;
};

// 16 bits a number, or 32.
__device__ void copy_bits(const AppendSide& part, const uint8_t* from, uint8_t* to, int lane) {
  if (!part.uses_quads) {
    for (int i = lane; i < part.side.code_bytes; i += kWarp) to[i] = from[i];
  } else if (lane * kQuad >= part.side.view.head_dim) {
    return;
  } else if (part.input.dtype == DType::kF32) {
    reinterpret_cast<uint4*>(to)[lane] = reinterpret_cast<const uint4*>(from)[lane];
  } else {
    reinterpret_cast<uint2*>(to)[lane] = reinterpret_cast<const uint2*>(from)[lane];
  }
}

// Slots are mostly fewer than 2^31, and a 64-bit division costs as much as encoding.
__device__ TokenRun place_of_slot(const AppendJob& job, int64_t slot) {
  if (job.num_slots <= INT32_MAX) {
    const auto s = static_cast<uint32_t>(slot);
    const auto size = static_cast<uint32_t>(job.block_size);
    return {s / size, static_cast<int>(s % size), 1};
  }
  return {slot / job.block_size, static_cast<int>(slot % job.block_size), 1};
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
  const TokenRun place = place_of_slot(job, slot);
  const uint8_t* input = part.input.data + (token * part.input.token_stride +
                                            (job.first_head + head) * part.input.head_stride) *
                                               bytes_of(part.input.dtype);
  const RowTarget to = {side.codes(place.block, place.first_token, head),
                        side.scales(place.block, place.first_token, head), side.tensor_scale(head)};
  if (part.keeps_bits) return copy_bits(part, input, to.codes, lane);
  const TransformRow transform = transform_row(
      part.transform, job.first_head + head, job.num_kv_heads, side.view.head_dim, position_block);
  int counted = 0;
  if (part.uses_quads) {
    Quad q = {};
    if (lane * kQuad < side.view.head_dim) q = load_quad(part.input.dtype, input, lane);
    apply_transform_quad(transform, q, side.view.head_dim, lane);
    counted = encode_quad(side, to, q, lane);
  } else {
    __syncwarp();
    for (int d = lane; d < side.view.head_dim; d += kWarp) {
      x[d] = load_float(part.input.dtype, input, d);
    }
    apply_transform_row(transform, x, side.view.head_dim, lane);
    counted = encode_row(side, to, x, lane);
  }
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
  const auto rows_of_token = static_cast<uint32_t>(2 * job.num_heads);
  for (uint32_t row = blockIdx.x * warps_per_cta + warp; row < job.num_rows;
       row += gridDim.x * warps_per_cta) {
    const uint32_t token = row / rows_of_token;
    const int in_token = static_cast<int>(row % rows_of_token);
    const bool is_key = in_token < job.num_heads;
    append_row(job, is_key ? job.k : job.v, token, is_key ? in_token : in_token - job.num_heads, x,
               lane);
  }
}

AppendSide append_side(const SideView& side, const FloatRows& input,
                       const SideTransform& transform) {
  return {cuda_side(side), input, transform,
          side.head_dim > 0 && transform.is_identity() && stored_dtype(side.spec) == input.dtype,
          side.head_dim > 0 && fits_quads(side, input)};
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
    if (launch.num_rows > INT32_MAX) {
      return invalid_argument("slot_mapping has {} tokens; {} rows are more than one call can take",
                              args.slot_mapping.size(), launch.num_rows);
    }
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
        .num_rows = static_cast<uint32_t>(launch.num_rows),
        .findings = findings,
    };
    cuda::append_rows<<<launch.num_ctas, cuda::RowsLaunch::kThreads, launch.shared_bytes,
                        static_cast<cudaStream_t>(context.stream)>>>(job);
    KVX_RETURN_IF_ERROR(device::cuda_launch_status("append"));
  }
  return {};
}

}  // namespace kvx::ops
