// append on a GPU: K and V of one run of heads in one launch.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/append/append_chunks.cuh"
#include "ops/append/append_cuda.hpp"
#include "ops/append/append_fed.hpp"
#include "ops/append/append_pages.cuh"
#include "ops/append/append_rows.cuh"
#include "ops/append/dual_scale/append_dual.hpp"
#include "ops/segments.hpp"
#include "ops/side_rows.hpp"

namespace kvx::ops {
namespace cuda {
namespace {

// blockIdx.y: K or V.
__global__ void __launch_bounds__(RowsLaunch::kThreads)
    append_rows(const __grid_constant__ AppendParams params) {
  extern __shared__ float shared[];
  const AppendSide& part = params.sides[blockIdx.y];
  if (!part.is_stored()) return;
  const int lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const uint32_t warps_per_cta = RowsLaunch::kThreads / kWarp;
  float* x = shared + warp * static_cast<uint32_t>(part.side.view.head_dim);
  const auto num_heads = static_cast<uint32_t>(params.num_heads);
  for (uint32_t row = blockIdx.x * warps_per_cta + warp; row < params.num_tokens * num_heads;
       row += gridDim.x * warps_per_cta) {
    append_row(params, part, row / num_heads, static_cast<int>(row % num_heads), x, lane,
               encode_row);
  }
}

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

AppendParams append_params(const AppendArgs& args, const HeadRun& run, DeviceCounters* counters) {
  return {
      .sides = {append_side(run.k, args.k, args.transform.k),
                append_side(run.v, args.v, args.transform.v)},
      .first_head = run.first_head,
      .num_heads = run.num_heads,
      .num_kv_heads = args.cache.num_kv_heads,
      .num_slots = args.cache.num_blocks * args.cache.block_size,
      .block_size = args.cache.block_size,
      .by_block_size = FastDivide(args.cache.block_size),
      .slot_mapping = args.slot_mapping.data(),
      .positions = args.positions.data(),
      .num_tokens = static_cast<uint32_t>(args.slot_mapping.size()),
      .counters = counters,
  };
}

// Whether K and V, as far as they are stored, can go by chunks.
bool run_fits_chunks(const AppendParams& params) {
  const auto fits = [](const AppendSide& part) {
    const SideView& side = part.side.view;
    return !side.is_stored() || (encodes_by_chunks(side) && fits_chunks(part.input));
  };
  const auto& [k, v] = params.sides;
  const bool alike = !k.is_stored() || !v.is_stored() || k.input.dtype == v.input.dtype;
  const bool counts_in_32_bits =
      params.num_tokens <= static_cast<uint32_t>(INT32_MAX / kWarp / params.num_heads);
  return alike && fits(k) && fits(v) && counts_in_32_bits;
}

Status launch_rows(const CudaContext& context, const AppendParams& params) {
  const int head_dim =
      std::max(params.sides[0].side.view.head_dim, params.sides[1].side.view.head_dim);
  const auto launch = RowsLaunch::of(params.num_tokens, params.num_heads, head_dim);
  const dim3 grid(ceil_div(launch.num_ctas, 2u), 2);
  append_rows<<<grid, RowsLaunch::kThreads, launch.shared_bytes,
                static_cast<cudaStream_t>(context.stream)>>>(params);
  return device::cuda_launch_status("append_rows");
}

Status launch_chunks(const CudaContext& context, const AppendParams& append) {
  const auto launch = AppendLaunch::of(context, append, kAppendCtasPerMultiprocessor);
  const AppendChunksParams params = {append, launch.walks};
  const auto& [k, v] = append.sides;
  const AppendSide& stored = k.side.view.head_dim == 0 ? v : k;
  const auto launch_for = [&](void (*kernel)(AppendChunksParams)) {
    return launch_overlapping(context, "append_chunks", kernel, launch.shape, params);
  };
  if (stored.input.dtype == DType::kF32) return launch_for(append_chunks<DType::kF32>);
  if (stored.input.dtype == DType::kF16) return launch_for(append_chunks<DType::kF16>);
  return launch_for(append_chunks<DType::kBF16>);
}

bool is_page_shared(const AppendSide& part) {
  return part.side.view.head_dim > 0 &&
         part.side.view.spec.scale_source == format::ScaleSource::kPageShared;
}

Status launch_pages(const CudaContext& context, const AppendParams& params) {
  using Launch = PagesLaunch;
  const int shared_bytes = std::max(Launch::shared_bytes(params.sides[0].side),
                                    Launch::shared_bytes(params.sides[1].side));
  const dim3 grid(kPageStripes, static_cast<unsigned>(params.num_heads), 2);
  append_pages<<<grid, Launch::kThreads, shared_bytes, static_cast<cudaStream_t>(context.stream)>>>(
      params);
  return device::cuda_launch_status("append_pages");
}

// The sides that a predicate holds for; the others are not stored. Returns whether there are any.
template <class Predicate>
bool select_sides(AppendParams& params, Predicate is_selected) {
  bool has_any = false;
  for (AppendSide& part : params.sides) {
    if (part.side.view.head_dim > 0 && is_selected(part)) {
      has_any = true;
    } else {
      part = {};
    }
  }
  return has_any;
}

// One launch, or two where one side alone has page-shared scales or dual-scale blocks.
Status launch(const CudaContext& context, const AppendArgs& args, const HeadRun& run,
              DeviceCounters* counters) {
  AppendParams rows = append_params(args, run, counters);
  AppendParams pages = rows;
  AppendParams blocks = rows;
  if (select_sides(pages, is_page_shared)) KVX_RETURN_IF_ERROR(launch_pages(context, pages));
  if (select_sides(blocks, is_dual)) {
    const DType window = args.window_dtype.value_or(DType::kF32);
    KVX_RETURN_IF_ERROR(launch_append_dual(context, blocks, window));
  }
  bool has_rows = select_sides(
      rows, [](const AppendSide& part) { return !is_page_shared(part) && !is_dual(part); });
  if (fits_fed(rows.sides[0])) {
    KVX_RETURN_IF_ERROR(launch_fed(context, rows));
    has_rows = rows.sides[1].is_stored();
  }
  if (!has_rows) return {};
  return run_fits_chunks(rows) ? launch_chunks(context, rows) : launch_rows(context, rows);
}

Status check(const AppendArgs& args) {
  for (const HeadRun& run : args.cache.runs) {
    const int most = INT32_MAX / run.num_heads;  // rows are counted in 32 bits
    if (std::ssize(args.slot_mapping) > most) {
      return invalid_argument("slot_mapping has {} tokens; a call takes at most {} of {} heads",
                              args.slot_mapping.size(), most, run.num_heads);
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

Status append(const CudaContext& context, const AppendArgs& args, DeviceCounters* counters) {
  KVX_RETURN_IF_ERROR(cuda::check(args));
  if (args.slot_mapping.empty()) return {};
  for (const HeadRun& run : args.cache.runs) {
    KVX_RETURN_IF_ERROR(cuda::launch(context, args, run, counters));
  }
  if (args.cache.next_segment == nullptr) return {};
  return append(context, next_segment_of(args), counters);
}

}  // namespace kvx::ops
