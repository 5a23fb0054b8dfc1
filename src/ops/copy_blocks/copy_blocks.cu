// copy_blocks on a GPU: rows as stored where both sides store alike, else decoded and encoded
// again; all pairs of a run of heads in one launch.
#include <cuda_runtime.h>

#include <optional>

#include "device/cuda_error.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/copy_blocks/copy_chunks.cuh"
#include "ops/copy_blocks/copy_dual.cuh"
#include "ops/copy_blocks/copy_pages.cuh"
#include "ops/copy_blocks/copy_runs.cuh"
#include "ops/copy_blocks/pack_chunks.cuh"
#include "ops/cuda/common_runs.hpp"
#include "ops/cuda/rows_launch.hpp"
#include "ops/segments.hpp"

namespace kvx::ops {
namespace cuda {
namespace {

// Given scales are not written, so they must be equal already.
__device__ bool has_equal_scales(const CopySide& side, const CopyRow& row, int lane) {
  bool is_equal = true;
  const int bytes = side.from.scale_bytes;
  for (int i = lane; i < side.from.num_groups * bytes; i += kWarp) {
    const int64_t group = i / bytes;
    is_equal &= row.from_scales[group * side.from.view.scales.group_stride + i % bytes] ==
                row.to_scales[group * side.to.view.scales.group_stride + i % bytes];
  }
  return __all_sync(kWholeWarp, is_equal);
}

__device__ void copy_row(const CopyParams& params, const CopySide& side, const CopyRow& row,
                         int head, float* x, int lane) {
  const bool is_given = side.from.view.spec.scale_source == format::ScaleSource::kGiven;
  if (side.is_alike && row.from_tensor_scale == row.to_tensor_scale &&
      (!is_given || has_equal_scales(side, row, lane))) {
    return copy_as_stored(side, row, lane);
  }
  __syncwarp();
  decode_row(side.from, {row.from_codes, row.from_scales, row.from_tensor_scale, row.from_channels},
             format::DecodeFor::kGather, x, lane);
  const RowTarget to = {row.to_codes, row.to_scales, row.to_tensor_scale, row.to_feedback};
  count_lost(params.counters, side.to, head, encode_row(side.to, to, x, lane));
}

// Whether there is something to do for any copy of a list that may be empty. By a whole CTA.
__device__ bool has_listed_copies(const CopyParams& params) {
  if (params.copies.num_tokens == nullptr) return true;
  bool is_listed = false;
  for (int64_t i = threadIdx.x; i < params.copies.count; i += blockDim.x) {
    const BlockCopy copy = copy_at(params, i);
    is_listed |= copy.num_tokens != 0 || !is_inside(params, copy);
  }
  return __syncthreads_or(is_listed) != 0;
}

// The reference kernel, a warp a row: every head_dim, address and encoder option. blockIdx: rows,
// which are (copy, token of the block, head); K or V. A window's plan mostly lists nothing, which
// is found faster than each row's copy.
__global__ void __launch_bounds__(RowsLaunch::kThreads)
    copy_rows(const __grid_constant__ CopyParams params) {
  extern __shared__ float shared[];
  const CopySide& side = params.sides[blockIdx.y];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps_per_cta = RowsLaunch::kThreads / kWarp;
  float* x = shared + warp * side.from.view.head_dim;
  const int64_t num_rows = params.copies.count * params.block_size * params.num_heads;
  if (!has_listed_copies(params)) return;
  for (int64_t row = int64_t{blockIdx.x} * warps_per_cta + warp; row < num_rows;
       row += int64_t{gridDim.x} * warps_per_cta) {
    const int64_t unit = row / params.num_heads;
    const int head = static_cast<int>(row % params.num_heads);
    const BlockCopy copy = copy_at(params, unit / params.block_size);
    const int token = static_cast<int>(unit % params.block_size);
    if (!is_inside(params, copy)) {
      const bool counts = token == 0 && head == 0 && lane == 0 && blockIdx.y == 0;
      if (counts) count_outside(params);
      continue;
    }
    if (token >= copy.num_tokens || side.is_skipped) continue;
    copy_row(params, side, copy_row_at(side, copy, token, head), head, x, lane);
  }
}

CopySide copy_side(const SideView& from, const SideView& to) {
  format::FormatSpec read_as = from.spec;
  read_as.scale_choice = to.spec.scale_choice;
  const bool is_alike = read_as == to.spec && has_q4_0_blocks(from) == has_q4_0_blocks(to);
  CopySide side = {cuda_side(from), cuda_side(to), {}, {}, is_alike, !to.is_stored()};
  if (to.is_stored()) {
    side.from_chunks = chunk_rows(from);
    side.to_chunks = chunk_rows(to);
  }
  return side;
}

bool fits(const CopySide& side) {
  return side.is_skipped || (fits_chunks(side.from.view) && encodes_by_chunks(side.to.view));
}

Status launch_rows(const CudaContext& context, const CopyParams& params) {
  const int head_dim =
      std::max(params.sides[0].from.view.head_dim, params.sides[1].from.view.head_dim);
  const auto launch =
      RowsLaunch::of(params.copies.count * params.block_size, params.num_heads, head_dim);
  const dim3 grid(ceil_div(launch.num_ctas, 2u), 2);
  copy_rows<<<grid, RowsLaunch::kThreads, launch.shared_bytes,
              static_cast<cudaStream_t>(context.stream)>>>(params);
  return device::cuda_launch_status("copy_rows");
}

Status launch_chunks(const CudaContext& context, const CopyParams& copy) {
  const int lanes =
      1 << std::max(copy.sides[0].from_chunks.log2_lanes, copy.sides[1].from_chunks.log2_lanes);
  const auto launch = ChunkLaunch::of(context.device.num_multiprocessors,
                                      copy.copies.count * copy.block_size, copy.num_heads, lanes);
  const CopyChunksParams params = {copy, launch.heads_at_once, FastDivide(launch.walks_per_token)};
  return launch_overlapping(context, "copy_chunks", copy_chunks,
                            {dim3(launch.num_ctas, 2), ChunkLaunch::kThreads}, params);
}

// Where rows can be moved without a look at them.
bool find_runs(const CopyParams& copy, CopyRunsParams& params) {
  int num_runs = 0;
  for (int i = 0; i < 2; ++i) {
    if (!find_regions(copy.sides[i], copy.num_heads, params.regions[i], num_runs)) return false;
  }
  if (num_runs == 0 || copy.copies.count > INT32_MAX / num_runs) return false;
  params.num_runs = static_cast<uint32_t>(num_runs);
  params.by_num_runs = FastDivide(num_runs);
  params.copy = copy;
  return true;
}

Status launch_runs(const CudaContext& context, const CopyRunsParams& params) {
  const int64_t num_warps = params.copy.copies.count * params.num_runs;
  const auto num_ctas = static_cast<unsigned>(ceil_div<int64_t>(num_warps, CopyRunsLaunch::kWarps));
  return launch_overlapping(context, "copy_runs", copy_runs,
                            {dim3(num_ctas, 2), CopyRunsLaunch::kThreads}, params);
}

// A side as append sees it: rows of 16 bits into the target.
AppendSide pack_side(const CopySide& side) {
  if (side.is_skipped) return {};
  const SideView& from = side.from.view;
  const DType type = stored_dtype(from.spec).value();
  const CodeAddress& c = from.codes;
  return {.side = side.to,
          .input = {c.base, type, c.token_stride / bytes_of(type), c.head_stride / bytes_of(type)},
          .transform = {},
          .chunks = side.to_chunks,
          .is_transformed = false,
          .keeps_bits = false};
}

// Whether all that is stored comes from rows of one 16-bit type and is encoded.
bool find_packing(const CopyParams& copy, PackChunksParams& params) {
  std::optional<DType> type;
  for (int i = 0; i < 2; ++i) {
    const CopySide& side = copy.sides[i];
    if (side.is_skipped) continue;
    const auto stored = stored_dtype(side.from.view.spec);
    const bool is_16_bits = stored && bytes_of(*stored) == 2;
    if (side.is_alike || !is_16_bits || (type && *type != *stored)) return false;
    type = stored;
    params.block_strides[i] = side.from.view.codes.block_stride;
  }
  params.copy = copy;
  AppendParams& append = params.append.append;
  append.sides[0] = pack_side(copy.sides[0]);
  append.sides[1] = pack_side(copy.sides[1]);
  append.num_heads = copy.num_heads;
  append.num_tokens = static_cast<uint32_t>(copy.copies.count * copy.block_size);
  append.counters = copy.counters;
  return type.has_value();
}

Status launch_packing(const CudaContext& context, PackChunksParams& params) {
  const auto launch = AppendLaunch::of(context, params.append.append, kPackCtasPerMultiprocessor);
  params.append.walks = launch.walks;
  const auto& [k, v] = params.append.append.sides;
  const DType type = (k.side.view.head_dim > 0 ? k : v).input.dtype;
  return launch_overlapping(
      context, "pack_chunks",
      type == DType::kF16 ? pack_chunks<DType::kF16> : pack_chunks<DType::kBF16>, launch.shape,
      params);
}

Status launch_pages(const CudaContext& context, const CopyParams& params) {
  int shared_bytes = 0;
  for (const CopySide& side : params.sides) {
    if (!side.is_skipped) shared_bytes = std::max(shared_bytes, PagesLaunch::shared_bytes(side.to));
  }
  const dim3 grid(static_cast<unsigned>(params.copies.count),
                  static_cast<unsigned>(params.num_heads), 2);
  copy_pages<<<grid, PagesLaunch::kThreads, shared_bytes,
               static_cast<cudaStream_t>(context.stream)>>>(params);
  return device::cuda_launch_status("copy_pages");
}

Status launch_by_rows(const CudaContext& context, const CopyParams& params) {
  CopyRunsParams runs = {};
  if (find_runs(params, runs)) return launch_runs(context, runs);
  const bool by_chunks =
      fits(params.sides[0]) && fits(params.sides[1]) &&
      params.copies.count <= INT32_MAX / kWarp / params.num_heads / params.block_size;
  PackChunksParams packing = {};
  if (by_chunks && find_packing(params, packing)) return launch_packing(context, packing);
  return by_chunks ? launch_chunks(context, params) : launch_rows(context, params);
}

// Page-shared scales that may have to be made. Where they are copied for sure, rows are copied one
// by one, each with its page's scale.
bool needs_pages(const CopySide& side) {
  const SideView& to = side.to.view;
  const bool copies = side.is_alike && side.from.view.tensor_scales == to.tensor_scales;
  return !side.is_skipped && to.spec.scale_source == format::ScaleSource::kPageShared && !copies;
}

// How a side's rows are copied: one by one, or by whole blocks.
enum class CopyUnit { kRows, kPages, kDualBlocks };

CopyUnit unit_of(const CopySide& side) {
  if (side.to.view.spec.is_dual()) return CopyUnit::kDualBlocks;
  return needs_pages(side) ? CopyUnit::kPages : CopyUnit::kRows;
}

// A launch for each unit that a side needs.
Status launch(const CudaContext& context, const CopyParams& params) {
  bool counts_copies = params.counts_copies;
  for (const CopyUnit unit : {CopyUnit::kDualBlocks, CopyUnit::kPages, CopyUnit::kRows}) {
    CopyParams part = params;
    part.counts_copies = counts_copies;
    for (CopySide& side : part.sides) side.is_skipped = side.is_skipped || unit_of(side) != unit;
    if (part.sides[0].is_skipped && part.sides[1].is_skipped) continue;
    KVX_RETURN_IF_ERROR(unit == CopyUnit::kRows    ? launch_by_rows(context, part)
                        : unit == CopyUnit::kPages ? launch_pages(context, part)
                                                   : launch_dual(context, part));
    counts_copies = false;
  }
  return {};
}

Status check_dims(const char* name, const SideView& from, const SideView& to) {
  if (from.head_dim == to.head_dim) return {};
  return invalid_argument("{} head_dim is {} in from and {} in to; expected the same", name,
                          from.head_dim, to.head_dim);
}

Status check(const LayerView& from, const LayerView& to) {
  if (from.block_size != to.block_size || from.num_kv_heads != to.num_kv_heads) {
    return invalid_argument(
        "from has block_size {} and {} KV heads, to {} and {}; expected the same", from.block_size,
        from.num_kv_heads, to.block_size, to.num_kv_heads);
  }
  KVX_RETURN_IF_ERROR(check_dims("k", from.runs.front().k, to.runs.front().k));
  KVX_RETURN_IF_ERROR(check_dims("v", from.runs.front().v, to.runs.front().v));
  return check_same_segments("from", from, "to", to);
}

// counts_copies: those out of range, which one segment of the rows does.
Status copy_segment(const CudaContext& context, const LayerView& from, const LayerView& to,
                    const CudaBlockCopies& copies, bool counts_copies, DeviceCounters* counters) {
  return for_each_common_run(from, to, [&](const HeadRun& source, const HeadRun& target) {
    const CopyParams params = {
        .sides = {copy_side(source.k, target.k), copy_side(source.v, target.v)},
        .num_heads = source.num_heads,
        .block_size = from.block_size,
        .by_block_size = FastDivide(from.block_size),
        .num_from_blocks = from.num_blocks,
        .num_to_blocks = to.num_blocks,
        .copies = copies,
        .counts_copies = counts_copies && source.first_head == 0,
        .counters = counters,
    };
    return launch(context, params);
  });
}

}  // namespace
}  // namespace cuda

Status copy_blocks(const CudaContext& context, const LayerView& from, const LayerView& to,
                   const CudaBlockCopies& copies, DeviceCounters* counters) {
  KVX_RETURN_IF_ERROR(cuda::check(from, to));
  if (copies.count == 0) return {};
  const LayerView* source = &from;
  for (const LayerView* target = &to; target != nullptr; target = target->next_segment) {
    KVX_RETURN_IF_ERROR(
        cuda::copy_segment(context, *source, *target, copies, target == &to, counters));
    source = source->next_segment;
  }
  return {};
}

}  // namespace kvx::ops
