// append on a GPU: K and V of one run of heads in one launch.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/append/append_chunks.cuh"
#include "ops/append/append_cuda.hpp"
#include "ops/append/append_rows.cuh"
#include "ops/side_rows.hpp"

namespace kvx::ops {
namespace cuda {
namespace {

AppendSide append_side(const SideView& side, const FloatRows& input,
                       const SideTransform& transform) {
  if (side.head_dim == 0) return {};
  return {.side = cuda_side(side),
          .input = input,
          .transform = transform,
          .chunks = chunk_rows(side),
          .is_transformed = !transform.is_identity(),
          .keeps_bits = transform.is_identity() && stored_dtype(side.spec) == input.dtype};
}

AppendJob append_job(const AppendArgs& args, const HeadRun& run, CudaFindings* findings) {
  return {
      .sides = {append_side(run.k, args.k, args.transform.k),
                append_side(run.v, args.v, args.transform.v)},
      .first_head = run.first_head,
      .num_heads = run.num_heads,
      .num_kv_heads = args.cache.num_kv_heads,
      .num_slots = args.cache.num_blocks * args.cache.block_size,
      .block_size = args.cache.block_size,
      .by_block_size = FastDivide(args.cache.block_size),
      .by_num_heads = FastDivide(run.num_heads),
      .slot_mapping = args.slot_mapping.data(),
      .positions = args.positions.data(),
      .num_rows = static_cast<uint32_t>(std::ssize(args.slot_mapping) * run.num_heads),
      .findings = findings,
  };
}

// Whether the run's K and V, as far as they are stored, can go by chunks.
bool run_fits_chunks(const AppendArgs& args, const HeadRun& run) {
  const auto fits = [](const SideView& side, const FloatRows& input) {
    return side.head_dim == 0 || side.is_alias || fits_chunks(side, input);
  };
  const bool alike = run.k.head_dim == 0 || run.v.head_dim == 0 ||
                     bytes_of(args.k.dtype) == bytes_of(args.v.dtype);
  return alike && fits(run.k, args.k) && fits(run.v, args.v);
}

Status launch_rows(const CudaContext& context, const AppendJob& job) {
  const int head_dim = std::max(job.sides[0].side.view.head_dim, job.sides[1].side.view.head_dim);
  const auto launch = RowsLaunch::of(job.num_rows, 1, head_dim);
  const dim3 grid(ceil_div(launch.num_ctas, 2u), 2);
  append_rows<<<grid, RowsLaunch::kThreads, launch.shared_bytes,
                static_cast<cudaStream_t>(context.stream)>>>(job);
  return device::cuda_launch_status("append_rows");
}

Status launch_chunks(const CudaContext& context, const AppendJob& job) {
  using Launch = AppendChunksLaunch;
  // Rows of a warp, of the side that has more lanes a row.
  const int lanes = 1 << std::max(job.sides[0].chunks.log2_lanes, job.sides[1].chunks.log2_lanes);
  const int64_t rows_per_cta = Launch::kThreads / lanes;
  const int64_t wanted = ceil_div<int64_t>(job.num_rows, rows_per_cta);
  const int64_t resident =
      int64_t{context.device.num_multiprocessors} * Launch::kCtasPerMultiprocessor / 2;
  const dim3 grid(static_cast<unsigned>(std::min(wanted, resident)), 2);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const AppendSide& stored = job.sides[job.sides[0].side.view.head_dim == 0 ? 1 : 0];
  if (bytes_of(stored.input.dtype) == 4) {
    append_chunks<4><<<grid, Launch::kThreads, 0, stream>>>(job);
  } else {
    append_chunks<2><<<grid, Launch::kThreads, 0, stream>>>(job);
  }
  return device::cuda_launch_status("append_chunks");
}

Status check_can_append(const SideView& side) {
  if (side.head_dim == 0 || side.spec.scale_source != format::ScaleSource::kPageShared) return {};
  return unsupported("{} with page-shared scales: append on CUDA computes a scale for each row",
                     side.spec.facts->name);
}

Status check(const AppendArgs& args) {
  for (const HeadRun& run : args.cache.runs) {
    KVX_RETURN_IF_ERROR(check_can_append(run.k));
    KVX_RETURN_IF_ERROR(check_can_append(run.v));
    const int64_t num_rows = std::ssize(args.slot_mapping) * run.num_heads;
    if (num_rows > INT32_MAX) {
      return invalid_argument("slot_mapping has {} tokens; {} rows are more than one call can take",
                              args.slot_mapping.size(), num_rows);
    }
  }
  const bool needs_positions = args.transform.k.block_offset || args.transform.v.block_offset;
  if (needs_positions && args.positions.size() < args.slot_mapping.size()) {
    return invalid_argument("positions has {} entries; a block_offset transform needs {}",
                            args.positions.size(), args.slot_mapping.size());
  }
  return {};
}

}  // namespace
}  // namespace cuda

Status append(const CudaContext& context, const AppendArgs& args, CudaFindings* findings) {
  KVX_RETURN_IF_ERROR(cuda::check(args));
  if (args.slot_mapping.empty()) return {};
  for (const HeadRun& run : args.cache.runs) {
    const cuda::AppendJob job = cuda::append_job(args, run, findings);
    KVX_RETURN_IF_ERROR(cuda::run_fits_chunks(args, run) ? cuda::launch_chunks(context, job)
                                                         : cuda::launch_rows(context, job));
  }
  return {};
}

}  // namespace kvx::ops
