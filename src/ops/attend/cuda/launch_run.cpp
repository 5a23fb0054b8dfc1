// From a run's plan to the parameters of its kernel, and to the launch.
#include "ops/attend/cuda/launch_run.hpp"

#include <numeric>

#include "core/checked.hpp"
#include "device/cuda_error.hpp"
#include "ops/attend/cuda/common/params.hpp"
#include "ops/attend/cuda/common/tile_side.hpp"
#include "ops/attend/cuda/latent/params.hpp"
#include "ops/attend/cuda/latent/plan_latent.hpp"
#include "ops/attend/cuda/prefill/expand/expand.hpp"
#include "ops/side_rows.hpp"

namespace kvx::ops::cuda {
namespace {

void fill(BatchParams& params, const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  const AttendArgs& args = call.args;
  params.seq_lens = args.seq_lens;
  params.length_words = args.in_place.length_words;
  params.q_starts = args.q_starts;
  params.num_sequences = args.num_sequences;
  params.total_q = call.limits.total_q;
  params.max_tokens = max_tokens_of(args, call.limits);
  params.max_q_len = call.limits.max_q_len;
  params.num_q_heads = args.num_q_heads;
  params.num_kv_heads = args.packed.num_kv_heads;
  params.q_per_kv = FastDivide(args.num_q_heads / args.packed.num_kv_heads);
  params.first_head = run.first_head;
  params.num_heads = run.num_heads;
  params.value_dim = run.v.head_dim;
  params.out = args.out;
  params.lse = args.lse;
  params.sinks = args.sinks;
  params.transform_v = args.transform.v;
  params.num_splits = FastDivide(plan.work_tiles.num_splits);
  params.partial_out = reinterpret_cast<float*>(call.workspace);
  params.partial_softmax = reinterpret_cast<Softmax2*>(call.workspace + plan.workspace.softmax_at);
}

void fill(AttendParams& params, const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  const AttendArgs& args = call.args;
  fill(static_cast<BatchParams&>(params), call, run, plan);
  params.block_table = args.block_table;
  params.q = args.q;
  params.key_dim = args.packed.key_dim();
  params.block_size = args.packed.block_size;
  params.num_packed_blocks = args.packed.num_blocks;
  params.num_full_precision_blocks = args.num_sink_blocks ? args.full_precision.num_blocks : 0;
  params.num_sink_blocks = args.num_sink_blocks;
  params.first_recent_block = args.first_recent_block;
  params.transform_k = args.transform.k;
  params.softmax_scale = args.softmax_scale;
  params.softcap = args.softcap;
  params.sees_later_tokens = args.tree_mask != nullptr || !args.is_causal;
  params.window = args.window;
  params.tree_mask = args.tree_mask;
  params.tree_mask_stride = args.tree_mask_stride;
  params.counters = call.counters;
}

KeyOffsetScores key_offsets_of(const AttendCall& call, const RunPlan& plan) {
  if (call.args.transform.k.block_offset == nullptr || plan.kind == KernelKind::kReference)
    return {};
  const int64_t num_blocks =
      ceil_div<int64_t>(max_tokens_of(call.args, call.limits), call.args.packed.block_size);
  return {reinterpret_cast<float*>(call.workspace + plan.workspace.key_offsets_at),
          static_cast<int>(num_blocks)};
}

// Instances with shares_scales multiply sums by the one binary32 scale of a head.
void share_scale(const SideView& side, TileSide& tile) {
  if (!has_shared_scale(side) || side.spec.scale_type != format::ScaleType::kF32) return;
  tile.shared_scale = reinterpret_cast<const float*>(side.scales.base);
  tile.shared_scale_stride = static_cast<int>(side.scales.head_stride / 4);
}

// tiles_at_once: that a stage of bulk copies has; 0 for prefill.
void fill(TensorCoreParams& params, const AttendCall& call, const HeadRun& run, const RunPlan& plan,
          int tiles_at_once, bool shares_scales) {
  const AttendArgs& args = call.args;
  fill(static_cast<AttendParams&>(params), call, run, plan);
  params.tile_k = tile_side(run.k, params.block_size, tiles_at_once);
  params.tile_v = tile_side(run.v, params.block_size, tiles_at_once);
  if (shares_scales) {
    share_scale(run.k, params.tile_k);
    share_scale(run.v, params.tile_v);
  }
  if (args.num_sink_blocks) {
    const HeadRun& full_precision = args.full_precision.runs.front();
    params.full_precision_first_head = full_precision.first_head;
    params.tile_full_precision_k = tile_side(full_precision.k, params.block_size, 1);
    params.tile_full_precision_v = tile_side(full_precision.v, params.block_size, 1);
  }
  params.tiles_per_block = params.block_size / kTileTokens;
  params.transforms_k = !args.transform.k.is_identity();
  params.transforms_v = !args.transform.v.is_identity();
  params.key_offsets = key_offsets_of(call, plan);
}

// The table that the call's kernel reads; launched before it.
KeyOffsetParams key_offset_params(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  const AttendArgs& args = call.args;
  KeyOffsetParams params = {};
  params.table = key_offsets_of(call, plan);
  params.q = args.q;
  params.q_starts = args.q_starts;
  params.seq_lens = args.seq_lens;
  params.num_sequences = args.num_sequences;
  params.total_q = call.limits.total_q;
  params.num_q_heads = args.num_q_heads;
  params.num_kv_heads = args.packed.num_kv_heads;
  params.first_head = run.first_head;
  params.num_heads = run.num_heads;
  params.dim = run.k.head_dim;
  params.block_size = args.packed.block_size;
  params.offsets = args.transform.k.block_offset;
  params.num_offset_blocks = args.transform.k.num_offset_blocks;
  params.softmax_scale = args.softmax_scale;
  params.has_cap = args.softcap != 0;
  params.counters = call.counters;
  return params;
}

BalanceParams balance_of(const AttendCall& call, const RunPlan& plan) {
  const WorkTilePlan& tiles = plan.work_tiles;
  const bool is_latent = plan.kind == KernelKind::kLatent;
  return {.most_work_tiles = tiles.balanced_work_tiles,
          .granule = is_latent
                         ? tiles.latent.step_tokens
                         : tiles.decode_mma.step_tokens * tiles.warps_of_cta / tiles.heads_of_cta,
          .num_row_tiles = tiles.num_row_tiles,
          .rows_of_work_tile = is_latent ? tiles.latent.rows : tiles.decode_mma.rows,
          .of_sequences =
              reinterpret_cast<SequenceWorkTiles*>(call.workspace + plan.workspace.work_tiles_at)};
}

// The second segment of the rows of heads from first_head on; without heads where there is none.
CudaRun more_of(const LayerView& layer, int first_head) {
  if (layer.next_segment == nullptr) return {};
  const HeadRun& run = run_of_head(*layer.next_segment, first_head);
  CudaRun more;
  more.first_head = run.first_head;
  more.num_heads = run.num_heads;
  more.k = cuda_side(run.k);
  return more;
}

cudaError_t launch_reference(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  ReferenceParams params = {};
  fill(params, call, run, plan);
  params.packed = cuda_run(run);
  params.packed_more = more_of(call.args.packed, run.first_head);
  if (call.args.num_sink_blocks) {
    params.full_precision = cuda_run(call.args.full_precision.runs.front());
    params.full_precision_more = more_of(call.args.full_precision, 0);
  }
  params.window_sinks = call.args.window_sinks;
  return launch_attend_reference(plan.reference, plan.grid, params,
                                 static_cast<cudaStream_t>(call.context.stream));
}

cudaError_t launch_decode_mma(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  const WorkTilePlan& tiles = plan.work_tiles;
  const DecodeMmaKernel& kernel = tiles.decode_mma;
  DecodeMmaParams params = {};
  fill(params, call, run, plan, kernel.tiles_at_once, kernel.shares_scales);
  params.balance = balance_of(call, plan);
  params.in_place = call.args.in_place;
  params.has_plain_entries = call.args.in_place.has_plain_entries();
  params.window_sinks = call.args.window_sinks;
  params.heads_of_cta = tiles.heads_of_cta;
  params.ctas_of_heads = FastDivide(run.num_heads / tiles.heads_of_cta);
  params.warps_of_head = FastDivide(tiles.warps_of_cta / tiles.heads_of_cta);
  params.merges_in_cluster = tiles.merges_in_cluster;
  params.splits_off_sinks = tiles.splits_off_sinks;
  params.tiles_per_copy = std::gcd(params.tiles_per_block, kernel.tiles_at_once);
  // Neighbour heads soon read the rest of the lines that copies of NHD rows fetch.
  params.codes_policy = is_nhd(run.k) ? kEvictNormally : kEvictFirst;
  return launch_attend_decode_mma(call.context, kernel, plan.grid, tiles.warps_of_cta, params);
}

// How the last 64 numbers of a run of latent rows are stored, and where those of 16 bits lie.
LatentRest latent_rest(const LayerView& layer, const HeadRun& run) {
  const HeadRun* segment = second_segment(layer, run);
  if (segment == nullptr) return LatentRest::kPacked;
  return segment->k.spec.facts->id == format::FormatId::kBF16 ? LatentRest::kBf16
                                                              : LatentRest::kF16;
}
TileRegion region_of_rest(const LayerView& layer, const HeadRun& run) {
  if (const HeadRun* segment = second_segment(layer, run)) {
    return tile_side(segment->k, layer.block_size, 0).codes;
  }
  TileRegion rest = tile_side(run.k, layer.block_size, 0).codes;
  rest.base += kLatentValueDim * run.k.spec.facts->element_bits / 8;
  return rest;
}

cudaError_t launch_latent(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  LatentParams params = {};
  fill(params, call, run, plan, 0, true);
  params.balance = balance_of(call, plan);
  const AttendArgs& args = call.args;
  params.rest = region_of_rest(args.packed, run);
  params.rest_rows = latent_rest(args.packed, run);
  if (args.num_sink_blocks) {
    params.full_precision_rest =
        region_of_rest(args.full_precision, args.full_precision.runs.front());
  }
  params.scale_shift = latent_scale_shift(run.k.spec);
  return launch_attend_latent(call.context, plan.work_tiles.latent, plan.grid, params);
}

cudaError_t launch_prefill(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  const PrefillKernel& kernel = plan.work_tiles.prefill;
  PrefillParams params = {};
  fill(params, call, run, plan, 0, kernel.shares_scales);
  params.num_row_tiles = plan.work_tiles.num_row_tiles;
  return launch_attend_prefill(kernel, plan.grid, params,
                               static_cast<cudaStream_t>(call.context.stream));
}

// The kernel over the rows that blocks become.
cudaError_t launch_expanded(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  HeadRun rows;
  const AttendArgs expanded = expanded_args(call.args, run, max_tokens_of(call.args, call.limits),
                                            call.workspace + plan.workspace.expanded_at, rows);
  const cudaError_t launched =
      launch_expand_rows(call.args, run, expanded, static_cast<cudaStream_t>(call.context.stream));
  if (launched != cudaSuccess) return launched;
  const AttendCall of_rows = {call.context, expanded, call.limits, call.workspace, call.counters};
  return plan.kind == KernelKind::kPrefill ? launch_prefill(of_rows, rows, plan)
                                           : launch_decode_mma(of_rows, rows, plan);
}

cudaError_t launch_kernel(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  if (plan.expands) return launch_expanded(call, run, plan);
  switch (plan.kind) {
    case KernelKind::kReference:
      return launch_reference(call, run, plan);
    case KernelKind::kDecodeMma:
      return launch_decode_mma(call, run, plan);
    case KernelKind::kLatent:
      return launch_latent(call, run, plan);
    case KernelKind::kPrefill:
      return launch_prefill(call, run, plan);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_merge(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  MergeParams params = {};
  fill(params, call, run, plan);
  params.balance = balance_of(call, plan);
  return launch_merge_splits(call.context, params);
}

}  // namespace

Status launch_run(const AttendCall& call, const HeadRun& run, const RunPlan& plan) {
  const KeyOffsetParams offsets = key_offset_params(call, run, plan);
  if (offsets.table.scores != nullptr) {
    KVX_RETURN_IF_ERROR(device::cuda_status(
        launch_score_offsets(offsets, static_cast<cudaStream_t>(call.context.stream)),
        "attend (block offsets)"));
  }
  KVX_RETURN_IF_ERROR(device::cuda_status(launch_kernel(call, run, plan), "attend"));
  if (!plan.needs_merge) return {};
  return device::cuda_status(launch_merge(call, run, plan), "attend (merge)");
}

}  // namespace kvx::ops::cuda
