// attend on a GPU: checks the call, plans the splits, hands out the workspace and launches.
#include <numeric>

#include "core/checked.hpp"
#include "device/cuda_error.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cuda/choose_kernel.hpp"
#include "ops/attend/cuda/job.hpp"
#include "ops/attend/cuda/plan_pieces.hpp"
#include "ops/attend/cuda/tile_side.hpp"

namespace kvx::ops {
namespace {

using cuda::AttendJob;
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
int most_heads_of_cta(const HeadRun& run, const cuda::TileKernel& kernel) {
  if (!kernel.takes_heads) return 1;
  constexpr int kMost = 4;  // more gain nothing where pieces are split further for it
  return cuda::is_nhd(run.k) ? std::gcd(run.num_heads, kMost) : 1;
}

AttendPlanCuda plan_run(const CudaContext& context, const AttendArgs& args,
                        const CudaAttendLimits& limits, const HeadRun& run, CudaAttendPath path) {
  AttendPlanCuda plan;
  const int64_t num_rows = max_rows_of(args, limits);
  int rows_of_piece = cuda::kPlainRows;
  if (path == CudaAttendPath::kTiles) {
    plan.tiles = cuda::tile_kernel_for(context, args, run, num_rows);
    rows_of_piece = plan.tiles.rows;
  } else if (cuda::is_prefill(path)) {
    plan.prefill = cuda::prefill_kernel_for(context, args, run, path);
    rows_of_piece = cuda::kPrefillRows;
  }
  plan.num_row_tiles = static_cast<int>(ceil_div<int64_t>(num_rows, rows_of_piece));
  SplitShape shape;
  shape.num_pieces = int64_t{args.num_sequences} * run.num_heads * plan.num_row_tiles;
  shape.max_tokens = max_tokens_of(args, limits);
  const bool is_tiles = path == CudaAttendPath::kTiles;
  if (args.window > 0) {
    const int64_t most_seen = int64_t{args.window_sinks} + args.window + limits.max_q_len;
    shape.max_tokens = std::min(shape.max_tokens, most_seen);
  }
  if (is_tiles) {
    const int most_heads = most_heads_of_cta(run, plan.tiles);
    const cuda::CtaOrder order =
        cuda::preferred_ctas(plan.tiles, run.k.head_dim, args.packed.block_size, shape.max_tokens,
                             most_heads, args.window_sinks);
    const auto no_clusters = [](int, int) { return 0; };
    cuda::plan_tiles(context, shape, most_heads, order, no_clusters, plan);
    if (args.window == 0) cuda::balance_tiles(context, shape, args.num_sequences, most_heads, plan);
    if (plan.balanced_pieces == 0) {
      const auto clusters_at_once = [&](int warps_of_cta, int ctas) {
        return cuda::clusters_at_once(context, plan.tiles, warps_of_cta, ctas);
      };
      cuda::plan_tiles(context, shape, most_heads, order, clusters_at_once, plan);
    }
    cuda::plan_sinks(args.window_sinks, plan);
  } else if (cuda::is_prefill(path)) {
    cuda::plan_prefill(context, shape, plan);
  } else {
    constexpr int kPlainCtas = 2;  // a multiprocessor
    shape.num_slots = int64_t{context.device.num_multiprocessors} * kPlainCtas;
    shape.granule = 64;
    plan.num_splits = plan_splits(shape).num_splits;
  }
  return plan;
}

// workspace: [partial_out][partial_softmax][sequence_pieces], each on 256 bytes
struct WorkspaceBytes {
  int64_t out = 0;
  int64_t softmax = 0;
  int64_t pieces = 0;
  int64_t total() const { return out + softmax + pieces; }
};

WorkspaceBytes workspace_bytes(const AttendArgs& args, const CudaAttendLimits& limits,
                               const HeadRun& run, const AttendPlanCuda& plan) {
  if (!plan.is_plain() && !plan.is_merged()) return {};  // pieces are whole rows
  const int64_t parts =
      plan.balanced_pieces > 0
          ? int64_t{plan.balanced_pieces} * plan.num_row_tiles * run.num_heads * plan.tiles.rows
          : limits.total_q * args.num_q_heads * plan.num_splits;
  return {round_up<int64_t>(parts * run.v.head_dim * 4, kWorkspaceAlignment),
          round_up<int64_t>(parts * 8, kWorkspaceAlignment),
          round_up<int64_t>(int64_t{args.num_sequences} * 8, kWorkspaceAlignment)};
}

// The plain kernel takes rows of any length that the device's shared memory holds sixteen of.
Status check_shared_memory(const CudaContext& context, const AttendArgs& args) {
  const bool has_offset = args.transform.k.block_offset != nullptr;
  const int most = context.device.shared_bytes_per_cta;
  for (const HeadRun& run : args.packed.runs) {
    const int least = cuda::least_plain_shared_bytes(run.k.head_dim, run.v.head_dim, has_offset);
    if (least <= most) continue;
    return unsupported("head_dim {} and {} need {} bytes of shared memory; CUDA device {} has {}",
                       run.k.head_dim, run.v.head_dim, least, context.device.index, most);
  }
  return {};
}

AttendJob make_job(const AttendArgs& args, const CudaAttendLimits& limits, const HeadRun& run,
                   const AttendPlanCuda& plan, uint8_t* workspace, CudaFindings* findings) {
  AttendJob job = {};
  job.packed = cuda::cuda_run(run);
  job.num_packed_blocks = args.packed.num_blocks;
  if (args.wide_head_blocks) {
    job.wide = cuda::cuda_run(args.wide.runs.front());
    job.num_wide_blocks = args.wide.num_blocks;
  }
  job.block_size = args.packed.block_size;
  job.num_kv_heads = args.packed.num_kv_heads;
  job.q_per_kv = cuda::FastDivide(args.num_q_heads / args.packed.num_kv_heads);
  job.total_q = limits.total_q;
  job.max_tokens = max_tokens_of(args, limits);
  job.max_q_len = limits.max_q_len;
  job.args = args;
  job.num_row_tiles = plan.num_row_tiles;
  job.num_splits = cuda::FastDivide(plan.num_splits);
  job.balanced_pieces = plan.balanced_pieces;
  job.piece_granule = plan.tiles.step_tokens * plan.warps_of_cta / plan.heads_of_cta;
  job.rows_of_piece = plan.tiles.rows;
  job.heads_of_cta = plan.heads_of_cta;
  job.merges_in_cluster = plan.merges_in_cluster;
  job.splits_off_sinks = plan.splits_off_sinks;
  job.ctas_of_heads = cuda::FastDivide(run.num_heads / plan.heads_of_cta);
  job.warps_of_head = cuda::FastDivide(std::max(plan.warps_of_cta / plan.heads_of_cta, 1));
  const WorkspaceBytes bytes = workspace_bytes(args, limits, run, plan);
  job.partial_out = reinterpret_cast<float*>(workspace);
  job.partial_softmax = reinterpret_cast<cuda::Softmax2*>(workspace + bytes.out);
  job.sequence_pieces =
      reinterpret_cast<cuda::SequencePieces*>(workspace + bytes.out + bytes.softmax);
  job.findings = findings;
  job.tile_k = cuda::tile_side(run.k, job.block_size, plan.tiles.tiles_at_once);
  job.tile_v = cuda::tile_side(run.v, job.block_size, plan.tiles.tiles_at_once);
  // What copies of NHD rows bring along, neighbour heads need a little later.
  job.codes_policy = cuda::is_nhd(run.k) ? cuda::kEvictNormally : cuda::kEvictFirst;
  job.transforms_k = !args.transform.k.is_identity();
  job.transforms_v = !args.transform.v.is_identity();
  if (args.wide_head_blocks) {
    const HeadRun& wide = args.wide.runs.front();
    job.tile_wide_k = cuda::tile_side(wide.k, job.block_size, 1);
    job.tile_wide_v = cuda::tile_side(wide.v, job.block_size, 1);
  }
  job.tiles_per_block = args.packed.block_size / cuda::kTileTokens;
  job.tiles_per_copy = std::gcd(job.tiles_per_block, plan.tiles.tiles_at_once);
  const bool shares_k = cuda::has_shared_scale(run.k) && run.k.spec.scale_type == ScaleType::kF32;
  const bool shares_v = cuda::has_shared_scale(run.v) && run.v.spec.scale_type == ScaleType::kF32;
  if (shares_k && (plan.tiles.shares_scales || plan.prefill.shares_scales)) {
    job.shared_k_scale = reinterpret_cast<const float*>(run.k.scales.base);
    job.shared_k_scale_stride = static_cast<int>(run.k.scales.head_stride / 4);
  }
  if (shares_v && (plan.tiles.shares_scales || plan.prefill.shares_scales)) {
    job.shared_v_scale = reinterpret_cast<const float*>(run.v.scales.base);
    job.shared_v_scale_stride = static_cast<int>(run.v.scales.head_stride / 4);
  }
  return job;
}

}  // namespace

bool attend_has_tiles(const CudaContext& context, const AttendArgs& args) {
  return cuda::takes(CudaAttendPath::kTiles, context, args);
}

bool attend_has_prefill(const CudaContext& context, const AttendArgs& args) {
  return cuda::takes(CudaAttendPath::kPrefill, context, args);
}

bool attend_takes_cells(const CudaContext& context, const HeadRun& run, int block_size) {
  for (const SideView* side : {&run.k, &run.v}) {
    const bool is_page_shared = side->spec.scale_source == format::ScaleSource::kPageShared;
    if (!side->is_stored() || is_page_shared) return false;
  }
  HeadRun in_cells = run;
  in_cells.k.in_cells = in_cells.v.in_cells = true;
  AttendArgs args;
  args.packed = {1, block_size, run.num_heads, {&in_cells, 1}};
  return cuda::tile_kernel_for(context, args, in_cells, 1).function != nullptr;
}

int64_t attend_workspace_bytes(const CudaContext& context, const AttendArgs& args,
                               const CudaAttendLimits& limits, CudaAttendPath path) {
  if (!cuda::takes(path, context, args)) return 0;
  if (path == CudaAttendPath::kChoose) {
    path = cuda::choose_path(context, args, max_rows_of(args, limits));
    // The call's q and out may lie where that kernel does not take them.
    const bool has_tiles = cuda::takes(CudaAttendPath::kTiles, context, args);
    const auto other = has_tiles ? CudaAttendPath::kTiles : CudaAttendPath::kPlain;
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
              uint8_t* workspace, CudaFindings* findings, CudaAttendPath path) {
  KVX_RETURN_IF_ERROR(check_attend(args, limits));
  if (!cuda::takes(path, context, args)) {
    return unsupported("no {} kernel takes this call (attend_has_{})",
                       path == CudaAttendPath::kTiles ? "tensor core" : "prefill",
                       path == CudaAttendPath::kTiles ? "tiles" : "prefill");
  }
  if (args.num_sequences == 0 || limits.total_q == 0) return {};
  KVX_RETURN_IF_ERROR(check_shared_memory(context, args));
  if (path == CudaAttendPath::kChoose)
    path = cuda::choose_path(context, args, max_rows_of(args, limits));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  for (const HeadRun& run : args.packed.runs) {
    const AttendPlanCuda plan = plan_run(context, args, limits, run, path);
    const AttendJob job = make_job(args, limits, run, plan, workspace, findings);
    const cudaError_t launched =
        cuda::is_prefill(path) ? cuda::launch_attend_prefill(plan.prefill, job, stream)
        : path == CudaAttendPath::kTiles
            ? cuda::launch_attend_tiles(context, plan.tiles, plan.warps_of_cta, job)
            : cuda::launch_attend_plain(job, context.device.shared_bytes_per_cta, stream);
    KVX_RETURN_IF_ERROR(device::cuda_status(launched, "attend"));
    if (!plan.is_plain() && !plan.is_merged()) continue;
    KVX_RETURN_IF_ERROR(
        device::cuda_status(cuda::launch_merge_splits(context, job), "attend (merge)"));
  }
  return {};
}

}  // namespace kvx::ops
