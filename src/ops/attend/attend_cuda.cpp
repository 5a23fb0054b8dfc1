// attend on a GPU: checks the call, plans the splits, hands out the workspace and launches.
#include <numeric>

#include "core/checked.hpp"
#include "device/cuda_error.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cuda/choose_kernel.hpp"
#include "ops/attend/cuda/common/params.hpp"
#include "ops/attend/cuda/common/tile_side.hpp"
#include "ops/attend/cuda/plan_work_tiles.hpp"

namespace kvx::ops {
namespace {

using cuda::AttendParams;
using cuda::AttendPlanCuda;
using format::ScaleType;

constexpr int64_t kWorkspaceAlignment = 256;

int64_t max_tokens_of(const AttendArgs& args, const CudaAttendLimits& limits) {
  const int64_t capacity = args.max_blocks_per_sequence * args.packed.block_size;
  return limits.max_tokens > 0 && limits.max_tokens < capacity ? limits.max_tokens : capacity;
}

// Query rows of a sequence and KV head.
int64_t max_rows_of(const AttendArgs& args, const CudaAttendLimits& limits) {
  return int64_t{limits.max_q_len} * (args.num_q_heads / args.packed.num_kv_heads);
}

// KV heads of a CTA, at most. In NHD pages rows and scales of neighbour heads share lines of 128
// bytes and sectors: warps of one CTA find them in the caches while they are there.
int most_heads_of_cta(const HeadRun& run, const cuda::DecodeMmaKernel& kernel) {
  if (!kernel.takes_heads) return 1;
  constexpr int kMost = 4;  // more gain nothing where work tiles are split further for it
  return cuda::is_nhd(run.k) ? std::gcd(run.num_heads, kMost) : 1;
}

AttendPlanCuda plan_run(const CudaContext& context, const AttendArgs& args,
                        const CudaAttendLimits& limits, const HeadRun& run, CudaAttendPath path) {
  AttendPlanCuda plan;
  const int64_t num_rows = max_rows_of(args, limits);
  int rows_of_work_tile = cuda::kReferenceRows;
  if (path == CudaAttendPath::kDecodeMma) {
    plan.tiles = cuda::decode_mma_kernel_for(context, args, run, num_rows);
    rows_of_work_tile = plan.tiles.rows;
  } else if (cuda::is_prefill(path)) {
    plan.prefill = cuda::prefill_kernel_for(context, args, run, path);
    rows_of_work_tile = cuda::kPrefillRows;
  }
  plan.num_row_tiles = static_cast<int>(ceil_div<int64_t>(num_rows, rows_of_work_tile));
  SplitShape shape;
  shape.num_work_tiles = int64_t{args.num_sequences} * run.num_heads * plan.num_row_tiles;
  shape.max_tokens = max_tokens_of(args, limits);
  const bool is_decode_mma = path == CudaAttendPath::kDecodeMma;
  if (args.window > 0) {
    const int64_t most_seen = int64_t{args.window_sinks} + args.window + limits.max_q_len;
    shape.max_tokens = std::min(shape.max_tokens, most_seen);
  }
  if (is_decode_mma) {
    const int most_heads = most_heads_of_cta(run, plan.tiles);
    const cuda::CtaOrder order =
        cuda::preferred_ctas(plan.tiles, run.k.head_dim, args.packed.block_size, shape.max_tokens,
                             most_heads, args.window_sinks);
    const auto no_clusters = [](int, int) { return 0; };
    cuda::plan_decode_mma(context, shape, most_heads, order, no_clusters, plan);
    if (args.window == 0)
      cuda::balance_decode_mma(context, shape, args.num_sequences, most_heads, plan);
    if (plan.balanced_work_tiles == 0) {
      const auto clusters_at_once = [&](int warps_of_cta, int ctas) {
        return cuda::clusters_at_once(context, plan.tiles, warps_of_cta, ctas);
      };
      cuda::plan_decode_mma(context, shape, most_heads, order, clusters_at_once, plan);
    }
    cuda::plan_sinks(args.window_sinks, plan);
  } else if (cuda::is_prefill(path)) {
    cuda::plan_prefill(context, shape, plan);
  } else {
    constexpr int kReferenceCtas = 2;  // a multiprocessor
    shape.num_slots = int64_t{context.device.num_multiprocessors} * kReferenceCtas;
    shape.granule = 64;
    plan.num_splits = plan_splits(shape).num_splits;
  }
  return plan;
}

// workspace: [partial_out][partial_softmax][sequence_work_tiles], each on 256 bytes
struct WorkspaceBytes {
  int64_t out = 0;
  int64_t softmax = 0;
  int64_t work_tiles = 0;
  int64_t total() const { return out + softmax + work_tiles; }
};

WorkspaceBytes workspace_bytes(const AttendArgs& args, const CudaAttendLimits& limits,
                               const HeadRun& run, const AttendPlanCuda& plan) {
  if (!plan.is_plain() && !plan.is_merged()) return {};  // work tiles are whole rows
  const int64_t parts =
      plan.balanced_work_tiles > 0
          ? int64_t{plan.balanced_work_tiles} * plan.num_row_tiles * run.num_heads * plan.tiles.rows
          : limits.total_q * args.num_q_heads * plan.num_splits;
  return {round_up<int64_t>(parts * run.v.head_dim * 4, kWorkspaceAlignment),
          round_up<int64_t>(parts * 8, kWorkspaceAlignment),
          round_up<int64_t>(int64_t{args.num_sequences} * 8, kWorkspaceAlignment)};
}

// The reference kernel takes rows of any length that the device's shared memory holds sixteen of.
Status check_shared_memory(const CudaContext& context, const AttendArgs& args) {
  const bool has_offset = args.transform.k.block_offset != nullptr;
  const int most = context.device.shared_bytes_per_cta;
  for (const HeadRun& run : args.packed.runs) {
    const int least =
        cuda::least_reference_shared_bytes(run.k.head_dim, run.v.head_dim, has_offset);
    if (least <= most) continue;
    return unsupported("head_dim {} and {} need {} bytes of shared memory; CUDA device {} has {}",
                       run.k.head_dim, run.v.head_dim, least, context.device.index, most);
  }
  return {};
}

AttendParams make_params(const AttendArgs& args, const CudaAttendLimits& limits, const HeadRun& run,
                         const AttendPlanCuda& plan, uint8_t* workspace, DeviceCounters* counters) {
  AttendParams params = {};
  params.packed = cuda::cuda_run(run);
  params.num_packed_blocks = args.packed.num_blocks;
  if (args.num_sink_blocks) {
    params.full_precision = cuda::cuda_run(args.full_precision.runs.front());
    params.num_full_precision_blocks = args.full_precision.num_blocks;
  }
  params.block_size = args.packed.block_size;
  params.num_kv_heads = args.packed.num_kv_heads;
  params.q_per_kv = cuda::FastDivide(args.num_q_heads / args.packed.num_kv_heads);
  params.total_q = limits.total_q;
  params.max_tokens = max_tokens_of(args, limits);
  params.max_q_len = limits.max_q_len;
  params.args = args;
  params.num_row_tiles = plan.num_row_tiles;
  params.num_splits = cuda::FastDivide(plan.num_splits);
  params.balanced_work_tiles = plan.balanced_work_tiles;
  params.work_tile_granule = plan.tiles.step_tokens * plan.warps_of_cta / plan.heads_of_cta;
  params.rows_of_work_tile = plan.tiles.rows;
  params.heads_of_cta = plan.heads_of_cta;
  params.merges_in_cluster = plan.merges_in_cluster;
  params.splits_off_sinks = plan.splits_off_sinks;
  params.ctas_of_heads = cuda::FastDivide(run.num_heads / plan.heads_of_cta);
  params.warps_of_head = cuda::FastDivide(std::max(plan.warps_of_cta / plan.heads_of_cta, 1));
  const WorkspaceBytes bytes = workspace_bytes(args, limits, run, plan);
  params.partial_out = reinterpret_cast<float*>(workspace);
  params.partial_softmax = reinterpret_cast<cuda::Softmax2*>(workspace + bytes.out);
  params.sequence_work_tiles =
      reinterpret_cast<cuda::SequenceWorkTiles*>(workspace + bytes.out + bytes.softmax);
  params.counters = counters;
  params.tile_k = cuda::tile_side(run.k, params.block_size, plan.tiles.tiles_at_once);
  params.tile_v = cuda::tile_side(run.v, params.block_size, plan.tiles.tiles_at_once);
  // What copies of NHD rows bring along, neighbour heads need a little later.
  params.codes_policy = cuda::is_nhd(run.k) ? cuda::kEvictNormally : cuda::kEvictFirst;
  params.transforms_k = !args.transform.k.is_identity();
  params.transforms_v = !args.transform.v.is_identity();
  if (args.num_sink_blocks) {
    const HeadRun& full_precision = args.full_precision.runs.front();
    params.tile_full_precision_k = cuda::tile_side(full_precision.k, params.block_size, 1);
    params.tile_full_precision_v = cuda::tile_side(full_precision.v, params.block_size, 1);
  }
  params.tiles_per_block = args.packed.block_size / cuda::kTileTokens;
  params.tiles_per_copy = std::gcd(params.tiles_per_block, plan.tiles.tiles_at_once);
  const bool shares_k = cuda::has_shared_scale(run.k) && run.k.spec.scale_type == ScaleType::kF32;
  const bool shares_v = cuda::has_shared_scale(run.v) && run.v.spec.scale_type == ScaleType::kF32;
  if (shares_k && (plan.tiles.shares_scales || plan.prefill.shares_scales)) {
    params.shared_k_scale = reinterpret_cast<const float*>(run.k.scales.base);
    params.shared_k_scale_stride = static_cast<int>(run.k.scales.head_stride / 4);
  }
  if (shares_v && (plan.tiles.shares_scales || plan.prefill.shares_scales)) {
    params.shared_v_scale = reinterpret_cast<const float*>(run.v.scales.base);
    params.shared_v_scale_stride = static_cast<int>(run.v.scales.head_stride / 4);
  }
  return params;
}

}  // namespace

bool attend_has_decode_mma(const CudaContext& context, const AttendArgs& args) {
  return cuda::takes(CudaAttendPath::kDecodeMma, context, args);
}

bool attend_has_prefill(const CudaContext& context, const AttendArgs& args) {
  return cuda::takes(CudaAttendPath::kPrefill, context, args);
}

bool attend_takes_interleaved_order(const CudaContext& context, const HeadRun& run,
                                    int block_size) {
  for (const SideView* side : {&run.k, &run.v}) {
    const bool is_page_shared = side->spec.scale_source == format::ScaleSource::kPageShared;
    if (!side->is_stored() || is_page_shared) return false;
  }
  HeadRun is_interleaved = run;
  is_interleaved.k.is_interleaved = is_interleaved.v.is_interleaved = true;
  AttendArgs args;
  args.packed = {1, block_size, run.num_heads, {&is_interleaved, 1}};
  return cuda::decode_mma_kernel_for(context, args, is_interleaved, 1).function != nullptr;
}

int64_t attend_workspace_bytes(const CudaContext& context, const AttendArgs& args,
                               const CudaAttendLimits& limits, CudaAttendPath path) {
  if (!cuda::takes(path, context, args)) return 0;
  if (path == CudaAttendPath::kChoose) {
    path = cuda::choose_path(context, args, max_rows_of(args, limits));
    // The call's q and out may lie where that kernel does not take them.
    const bool has_decode_mma = cuda::takes(CudaAttendPath::kDecodeMma, context, args);
    const auto other = has_decode_mma ? CudaAttendPath::kDecodeMma : CudaAttendPath::kReference;
    if (path == CudaAttendPath::kPrefill) {
      return std::max(attend_workspace_bytes(context, args, limits, path),
                      attend_workspace_bytes(context, args, limits, other));
    }
  }
  int64_t most = 0;
  for (const HeadRun& run : args.packed.runs) {
    const AttendPlanCuda plan = plan_run(context, args, limits, run, path);
    most = std::max(most, workspace_bytes(args, limits, run, plan).total());
  }
  return most;
}

Status attend(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
              uint8_t* workspace, DeviceCounters* counters, CudaAttendPath path) {
  KVX_RETURN_IF_ERROR(check_attend(args, limits));
  if (!cuda::takes(path, context, args)) {
    return unsupported("no {} kernel takes this call (attend_has_{})",
                       path == CudaAttendPath::kDecodeMma ? "tensor core" : "prefill",
                       path == CudaAttendPath::kDecodeMma ? "tiles" : "prefill");
  }
  if (args.num_sequences == 0 || limits.total_q == 0) return {};
  KVX_RETURN_IF_ERROR(check_shared_memory(context, args));
  if (path == CudaAttendPath::kChoose)
    path = cuda::choose_path(context, args, max_rows_of(args, limits));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  for (const HeadRun& run : args.packed.runs) {
    const AttendPlanCuda plan = plan_run(context, args, limits, run, path);
    const AttendParams params = make_params(args, limits, run, plan, workspace, counters);
    const cudaError_t launched =
        cuda::is_prefill(path) ? cuda::launch_attend_prefill(plan.prefill, params, stream)
        : path == CudaAttendPath::kDecodeMma
            ? cuda::launch_attend_decode_mma(context, plan.tiles, plan.warps_of_cta, params)
            : cuda::launch_attend_reference(params, context.device.shared_bytes_per_cta, stream);
    KVX_RETURN_IF_ERROR(device::cuda_status(launched, "attend"));
    if (!plan.is_plain() && !plan.is_merged()) continue;
    KVX_RETURN_IF_ERROR(
        device::cuda_status(cuda::launch_merge_splits(context, params), "attend (merge)"));
  }
  return {};
}

}  // namespace kvx::ops
