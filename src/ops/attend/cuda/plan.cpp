// Which kernel and instance accept a run of heads, into which work tiles the call is cut, and where
// partial results lie.
#include "ops/attend/cuda/plan.hpp"

#include <algorithm>
#include <numeric>

#include "core/checked.hpp"
#include "ops/attend/cuda/common/key_offsets.hpp"
#include "ops/attend/cuda/common/tile_side.hpp"
#include "ops/attend/cuda/formats.hpp"
#include "ops/attend/cuda/latent/plan_latent.hpp"
#include "ops/attend/cuda/prefill/expand/expand.hpp"
#include "ops/cuda/fits_chunks.hpp"

namespace kvx::ops::cuda {
namespace {

// Instances of the tensor core kernels exist for f16 scales of groups of 64 in int8 and int4, and
// for one scale a row in fp8, fp4_row and int4_row.
bool has_instance_scales(const format::FormatSpec& spec) {
  switch (tensor_core_format(spec.facts->id).scale_path) {
    case ScalePath::kGroups64:
      return spec.scale_type == format::ScaleType::kF16 && spec.group_size == 64;
    case ScalePath::kRow:
      return spec.group_size == format::kWholeRow;
    default:
      return true;
  }
}

// Whether the full-precision window is in bf16 and lies where the tensor core kernels can copy it.
bool accepts_full_precision_window(const AttendArgs& args, const HeadRun& run) {
  if (args.full_precision.runs.size() != 1) return false;
  const HeadRun& full_precision = args.full_precision.runs.front();
  if (full_precision.k.head_dim != run.k.head_dim || full_precision.v.head_dim != run.v.head_dim)
    return false;
  for (const SideView* side : {&full_precision.k, &full_precision.v}) {
    const bool is_bf16 = side->spec.facts->id == format::FormatId::kBF16;
    if (!is_bf16 || !can_copy(*side, args.packed.block_size, full_precision.num_heads, false))
      return false;
  }
  return true;
}

// The sinks of a window have tiles of their own, whose tokens are not those of blocks.
bool accepts_block_offsets(const AttendArgs& args, const HeadRun& run) {
  if (args.transform.k.block_offset == nullptr) return true;
  return args.window_sinks == 0 && run.k.head_dim <= kMostOffsetDim;
}

// Whether a tensor core kernel accepts the run, if an instance for its formats is compiled.
bool accepts_packed_rows(const AttendArgs& args, const HeadRun& run) {
  const int block_size = args.packed.block_size;
  if (block_size % kTileTokens != 0 || !accepts_block_offsets(args, run)) return false;
  const bool is_padded = !has_exact_tiles(run.k.head_dim, run.v.head_dim);
  for (const SideView* side : {&run.k, &run.v}) {
    const bool fits = can_copy(*side, block_size, run.num_heads, is_padded);
    if (!fits || !has_instance_scales(side->spec)) return false;
  }
  return true;
}

// Whether bulk copies can fetch the rows, and one of their stages lies in one block: with shorter
// blocks, each lane that copies a block takes a turn of its warp.
bool has_dense_rows(const AttendArgs& args, const HeadRun& run) {
  constexpr int kStageTokens = kSideStageTiles * kTileTokens;
  return args.packed.block_size % kStageTokens == 0 && is_dense(run.k) && is_dense(run.v);
}

// Bulk copies came with compute capability 9.0. A newer device may still run code for older ones.
bool has_bulk_copies(const CudaContext& context) {
  return device::cuda_code_version(context.device) >= 90;
}

// Whether decode_mma accepts the blocks of a dual-scale format, if an instance is compiled.
bool accepts_dual_blocks(const CudaContext& context, const AttendArgs& args, const HeadRun& run) {
  constexpr int kStageTokens = kSideStageTiles * kTileTokens;
  const int block_size = args.packed.block_size;
  return has_bulk_copies(context) && block_size % kStageTokens == 0 &&
         accepts_block_offsets(args, run) && can_copy_blocks(run.k, block_size, run.num_heads) &&
         can_copy_blocks(run.v, block_size, run.num_heads);
}

// wgmma, and the instances for interleaved order, exist only in code made for 9.0.
bool has_hopper_code(const CudaContext& context) {
  return device::cuda_code_version(context.device) == 90;
}

// What multiplies in the prefill kernel of a path.
PrefillEngine engine_of(const CudaContext& context, CudaAttendPath path) {
  return path == CudaAttendPath::kPrefill && has_hopper_code(context) ? PrefillEngine::kWgmma
                                                                      : PrefillEngine::kMmaSync;
}

PrefillKernel prefill_instance(const CudaContext& context, const AttendArgs& args,
                               const HeadRun& run, PrefillEngine engine);

// expanded_args() of a call that has no workspace yet: with an address that is aligned alike.
AttendArgs args_to_plan(const AttendArgs& args, const HeadRun& run, HeadRun& expanded) {
  auto* workspace = reinterpret_cast<uint8_t*>(kCudaWorkspaceAlignment);
  return expanded_args(args, run, args.packed.block_size, workspace, expanded);
}

// The same for what becomes rows of bf16 or fp8 on 16 bytes.
PrefillKernel expanded_instance(const CudaContext& context, const AttendArgs& args,
                                const HeadRun& run, PrefillEngine engine) {
  if (run.k.is_interleaved || run.v.is_interleaved) return {};
  const bool has_fragments = run.k.codes.is_fragmented() || run.v.codes.is_fragmented();
  if (has_fragments && !joins_fragments(run)) return {};
  if (args.num_sink_blocks != nullptr && !accepts_full_precision_window(args, run)) return {};
  HeadRun expanded;
  const AttendArgs of_rows = args_to_plan(args, run, expanded);
  return prefill_instance(context, of_rows, expanded, engine);
}

// The instance of a prefill kernel that accepts a run; without a function where there is none.
PrefillKernel prefill_instance(const CudaContext& context, const AttendArgs& args,
                               const HeadRun& run, PrefillEngine engine) {
  if (expands_for_prefill(run)) return expanded_instance(context, args, run, engine);
  if (args.tree_mask || args.window_sinks > 0) return {};
  if (!accepts_packed_rows(args, run)) return {};
  if (!fits_chunks(args.q) || !fits_chunks(args.out)) return {};
  const PrefillDims dims = {run.k.head_dim, run.v.head_dim};
  // The instances for longer rows do not decode interleaved order.
  if ((run.k.is_interleaved || run.v.is_interleaved) && !dims.fit(128, 128)) return {};
  for (const SideView* side : {&run.k, &run.v}) {  // rows in whole copies of 16 bytes
    const int code_bytes = format::code_bytes_per_row(side->spec, side->head_dim);
    if (code_bytes % 16 != 0 || !can_copy(*side, args.packed.block_size, run.num_heads, false)) {
      return {};
    }
  }
  const bool has_full_precision_window = args.num_sink_blocks != nullptr;
  if (has_full_precision_window && !accepts_full_precision_window(args, run)) return {};
  const PrefillKernel kernel =
      find_prefill_kernel(engine, {.k = {run.k.spec.facts->id, has_shared_scale(run.k)},
                                   .v = {run.v.spec.facts->id, has_shared_scale(run.v)},
                                   .dims = dims,
                                   .has_full_precision_window = has_full_precision_window,
                                   .may_round = args.q.dtype == DType::kBF16});
  return kernel.shared_bytes <= context.device.shared_bytes_per_cta ? kernel : PrefillKernel{};
}

// The decode_mma instance that accepts a run; without a function where there is none.
DecodeMmaKernel decode_mma_instance(const CudaContext& context, const AttendArgs& args,
                                    const HeadRun& run, int64_t num_rows) {
  if (joins_fragments(run)) {
    HeadRun joined;
    const AttendArgs of_rows = args_to_plan(args, run, joined);
    return decode_mma_instance(context, of_rows, joined, num_rows);
  }
  const bool is_interleaved = run.k.is_interleaved;
  if (run.v.is_interleaved != is_interleaved || (is_interleaved && !has_hopper_code(context)))
    return {};
  const bool is_dual = run.k.spec.is_dual() || run.v.spec.is_dual();
  if (!(is_dual ? accepts_dual_blocks(context, args, run) : accepts_packed_rows(args, run)))
    return {};
  if (has_word_scale(run.k) != has_word_scale(run.v)) return {};
  const DecodeMmaKernel kernel = find_decode_mma_kernel(
      run.k.spec.facts->id, run.v.spec.facts->id,
      {.key_dim = run.k.head_dim,
       .value_dim = run.v.head_dim,
       .has_dense_rows = has_bulk_copies(context) && has_dense_rows(args, run),
       .has_shared_scales = has_shared_scale(run.k) && has_shared_scale(run.v),
       .has_word_scales = has_word_scale(run.k),
       .has_many_rows = num_rows > kNTileRows,
       .has_full_precision_window = args.num_sink_blocks != nullptr,
       .is_interleaved = is_interleaved});
  const bool fits = !args.num_sink_blocks ||
                    (kernel.accepts_full_precision && accepts_full_precision_window(args, run));
  return fits ? kernel : DecodeMmaKernel{};
}

// --- the workspace ---

// What a plan may take, where a row that is not split needs none.
constexpr int64_t kMostWorkspaceBytes = int64_t{64} << 20;

// Sizes of the workspace for so many partial results of a row.
WorkspaceLayout layout_of(int64_t parts, int value_dim, int num_sequences) {
  WorkspaceLayout layout;
  layout.softmax_at = round_up<int64_t>(parts * value_dim * 4, kCudaWorkspaceAlignment);
  layout.work_tiles_at = layout.softmax_at + round_up<int64_t>(parts * 8, kCudaWorkspaceAlignment);
  layout.bytes =
      layout.work_tiles_at + round_up<int64_t>(int64_t{num_sequences} * 8, kCudaWorkspaceAlignment);
  return layout;
}

// The most partial results for which that is at most kMostWorkspaceBytes, of any number of
// sequences.
int64_t most_parts(int value_dim) {
  constexpr int64_t kMostOfSequences = int64_t{kMaxCudaSequences} * 8 + 3 * kCudaWorkspaceAlignment;
  return (kMostWorkspaceBytes - kMostOfSequences) / (int64_t{value_dim} * 4 + 8);
}

// Splits that the sinks of a window may be, beside those of the other tokens: a warp begins with as
// many sinks as a tile has (plan_sinks).
int splits_of_sinks(const AttendArgs& args, KernelKind kind) {
  return kind == KernelKind::kDecodeMma && args.window_sinks > kTileTokens ? 1 : 0;
}

// The most splits of other tokens, where each split of num_rows query rows leaves a partial result.
int most_splits(const AttendArgs& args, KernelKind kind, int value_dim, int64_t num_rows) {
  const int64_t most = most_parts(value_dim) / std::max<int64_t>(num_rows, 1);
  return static_cast<int>(std::clamp<int64_t>(most - splits_of_sinks(args, kind), 1, kMaxSplits));
}

// Of the table that a tensor core kernel reads what K's block offsets add from.
int64_t key_offset_bytes(const AttendArgs& args, int64_t total_q, int64_t max_tokens) {
  if (args.transform.k.block_offset == nullptr) return 0;
  const int64_t num_blocks = ceil_div<int64_t>(max_tokens, args.packed.block_size);
  return round_up<int64_t>(total_q * args.num_q_heads * num_blocks * 4, kCudaWorkspaceAlignment);
}

bool needs_key_offsets(const AttendArgs& args, KernelKind kind) {
  return args.transform.k.block_offset != nullptr && kind != KernelKind::kReference;
}

// The bytes that the largest run takes whose rows or blocks a plan expands.
int64_t expanded_bytes(const AttendArgs& args, const CudaAttendLimits& limits,
                       const CallPlan& plan) {
  int64_t most = 0;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    if (!plan.runs[i].expands) continue;
    const HeadRun& run = args.packed.runs[i];
    most = std::max(most, expanded_layout(args, run, max_tokens_of(args, limits)).bytes);
  }
  return most;
}

void begin_plan(const AttendArgs& args, KernelKind kind, CallPlan& plan) {
  plan.runs.assign(args.packed.runs.size(), {});
  for (RunPlan& run : plan.runs) run.kind = kind;
}

void choose_reference(const AttendArgs& args, CallPlan& plan) {
  begin_plan(args, KernelKind::kReference, plan);
}

bool choose_decode_mma(const CudaContext& context, const AttendArgs& args, int64_t num_rows,
                       CallPlan& plan) {
  begin_plan(args, KernelKind::kDecodeMma, plan);
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    DecodeMmaKernel& kernel = plan.runs[i].work_tiles.decode_mma;
    kernel = decode_mma_instance(context, args, args.packed.runs[i], num_rows);
    if (!kernel.function) return false;
    plan.runs[i].expands = joins_fragments(args.packed.runs[i]);
  }
  return true;
}

bool choose_latent(const CudaContext& context, const AttendArgs& args, CudaAttendPath path,
                   CallPlan& plan) {
  begin_plan(args, KernelKind::kLatent, plan);
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    LatentKernel& kernel = plan.runs[i].work_tiles.latent;
    kernel =
        latent_instance(context, args, args.packed.runs[i], path != CudaAttendPath::kLatentMma);
    if (!kernel.function) return false;
  }
  return true;
}

bool choose_prefill(const CudaContext& context, const AttendArgs& args, PrefillEngine engine,
                    CallPlan& plan) {
  begin_plan(args, KernelKind::kPrefill, plan);
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    PrefillKernel& kernel = plan.runs[i].work_tiles.prefill;
    kernel = prefill_instance(context, args, args.packed.runs[i], engine);
    if (!kernel.function) return false;
    plan.runs[i].expands = expands_for_prefill(args.packed.runs[i]);
  }
  return true;
}

bool has_bits(const HeadRun& run, int bits) {
  return run.k.spec.facts->element_bits == bits && run.v.spec.facts->element_bits == bits;
}

// Rows of bf16 that are written and read again are as many bytes as so many passes over blocks of
// 3 bits; rows of fp8, over rows of 4 bits with the prefill tile's own two.
int passes_of_expanding(const HeadRun& run) {
  return expands_to_fp8(run) ? 6 : 12;
}
constexpr int64_t kRowsOfPass = 2 * kNTileRows;

// Passes of decode_mma over the cache, of up to 16 query rows each, that cost as much as one
// prefill tile of 128 rows (measured on an H200).
int passes_of_prefill_tile(const CudaContext& context, const HeadRun& run,
                           const PrefillKernel& kernel) {
  if (expands_for_prefill(run) && !joins_fragments(run)) return passes_of_expanding(run);
  if (!has_hopper_code(context)) return 2;
  if (has_bits(run, 16)) return 1;
  // The scales of 4-bit integers multiply every score.
  const bool is_slow =
      has_bits(run, 4) && has_exact_tiles(run.k.head_dim, run.v.head_dim) && !kernel.shares_scales;
  return is_slow ? 3 : 2;
}

// Whether prefill accepts the call and costs less than decode_mma.
bool prefers_prefill(const CudaContext& context, const AttendArgs& args, int64_t num_rows,
                     CallPlan& plan) {
  if (num_rows <= kRowsOfPass) return false;
  if (!choose_prefill(context, args, engine_of(context, CudaAttendPath::kPrefill), plan))
    return false;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const int passes =
        passes_of_prefill_tile(context, args.packed.runs[i], plan.runs[i].work_tiles.prefill);
    if (num_rows <= kRowsOfPass * passes) return false;
  }
  return true;
}

// KV heads of a CTA, at most. In NHD pages, rows and scales of neighbour heads share lines of 128
// bytes and sectors: the warps of one CTA find them in the caches while they are there.
int most_heads_of_cta(const HeadRun& run, const DecodeMmaKernel& kernel) {
  if (!kernel.accepts_heads) return 1;
  constexpr int kMost = 4;  // more gain nothing where work tiles are split further for it
  return is_nhd(run.k) ? std::gcd(run.num_heads, kMost) : 1;
}

void cut_for_decode_mma(const CudaContext& context, const AttendArgs& args, const HeadRun& run,
                        const SplitShape& shape, WorkTilePlan& plan) {
  const int most_heads = most_heads_of_cta(run, plan.decode_mma);
  const CtaOrder order = preferred_ctas(plan.decode_mma, run.k.head_dim, args.packed.block_size,
                                        shape.max_tokens, most_heads, args.window_sinks);
  const auto no_clusters = [](int, int) { return 0; };
  plan_decode_mma(context, shape, most_heads, order, no_clusters, plan);
  if (args.window == 0) {
    const int64_t parts_of_budget =
        int64_t{plan.num_row_tiles} * run.num_heads * plan.decode_mma.rows;
    const int64_t most = most_parts(run.v.head_dim) / parts_of_budget;
    balance_decode_mma(context, shape, args.num_sequences, most_heads, plan, most);
  }
  if (plan.balanced_work_tiles == 0) {
    const auto num_clusters = [&](int warps_of_cta, int ctas) {
      return clusters_at_once(context, plan.decode_mma, warps_of_cta, ctas);
    };
    plan_decode_mma(context, shape, most_heads, order, num_clusters, plan);
  }
  plan_sinks(args.window_sinks, plan);
}

void cut_for_reference(const CudaContext& context, SplitShape shape, WorkTilePlan& plan) {
  constexpr int kCtas = 2;  // of a multiprocessor
  shape.num_slots = int64_t{context.device.num_multiprocessors} * kCtas;
  shape.granule = 64;
  plan.num_splits = plan_splits(shape).num_splits;
}

int rows_of_work_tile(const RunPlan& plan) {
  switch (plan.kind) {
    case KernelKind::kReference:
      return kReferenceRows;
    case KernelKind::kDecodeMma:
      return plan.work_tiles.decode_mma.rows;
    case KernelKind::kLatent:
      return plan.work_tiles.latent.rows;
    case KernelKind::kPrefill:
      return kPrefillRows;
  }
  return 0;
}

void cut_into_work_tiles(const CudaContext& context, const AttendArgs& args,
                         const CudaAttendLimits& limits, const HeadRun& run, int64_t num_rows,
                         RunPlan& plan) {
  WorkTilePlan& tiles = plan.work_tiles;
  tiles.num_row_tiles = static_cast<int>(ceil_div<int64_t>(num_rows, rows_of_work_tile(plan)));
  SplitShape shape;
  shape.num_work_tiles = int64_t{args.num_sequences} * run.num_heads * tiles.num_row_tiles;
  shape.max_tokens = max_tokens_of(args, limits);
  if (args.window > 0) {
    const int64_t most_seen = int64_t{args.window_sinks} + args.window + limits.max_q_len;
    shape.max_tokens = std::min(shape.max_tokens, most_seen);
  }
  shape.most_splits =
      most_splits(args, plan.kind, run.v.head_dim, limits.total_q * args.num_q_heads);
  switch (plan.kind) {
    case KernelKind::kReference:
      return cut_for_reference(context, shape, tiles);
    case KernelKind::kDecodeMma:
      return cut_for_decode_mma(context, args, run, shape, tiles);
    case KernelKind::kLatent:
      return plan_latent(context, args, shape, most_parts(run.v.head_dim), tiles);
    case KernelKind::kPrefill:
      return plan_prefill(context, shape, tiles);
  }
}

// blockIdx: {KV heads and tiles of query rows, split, sequence}; with a budget of work tiles for
// all sequences: {work tile, tile of query rows and KV heads}; prefill: {tile of query rows, head
// and split, sequence}.
LaunchGrid grid_of(const AttendArgs& args, const HeadRun& run, const RunPlan& plan) {
  const WorkTilePlan& tiles = plan.work_tiles;
  const auto sequences = static_cast<unsigned>(args.num_sequences);
  const auto splits = static_cast<unsigned>(tiles.num_splits);
  const auto row_tiles = static_cast<unsigned>(tiles.num_row_tiles);
  const auto heads = static_cast<unsigned>(run.num_heads);
  switch (plan.kind) {
    case KernelKind::kReference:
      return {heads * row_tiles, splits, sequences};
    case KernelKind::kPrefill:
      return {row_tiles, heads * splits, sequences};
    case KernelKind::kDecodeMma:
    case KernelKind::kLatent:
      break;
  }
  const unsigned ctas = heads / static_cast<unsigned>(tiles.heads_of_cta) * row_tiles;
  if (tiles.balanced_work_tiles > 0)
    return {static_cast<unsigned>(tiles.balanced_work_tiles) * ctas, 1, 1};
  return {ctas, splits, sequences};
}

WorkspaceLayout workspace_of_splits(const AttendArgs& args, const CudaAttendLimits& limits,
                                    const HeadRun& run, const RunPlan& plan) {
  if (!plan.needs_merge) return {};
  const WorkTilePlan& tiles = plan.work_tiles;
  const int64_t parts = tiles.balanced_work_tiles > 0
                            ? int64_t{tiles.balanced_work_tiles} * tiles.num_row_tiles *
                                  run.num_heads * rows_of_work_tile(plan)
                            : limits.total_q * args.num_q_heads * tiles.num_splits;
  return layout_of(parts, run.v.head_dim, args.num_sequences);
}

WorkspaceLayout workspace_of(const AttendArgs& args, const CudaAttendLimits& limits,
                             const HeadRun& run, const RunPlan& plan) {
  WorkspaceLayout layout = workspace_of_splits(args, limits, run, plan);
  if (plan.expands) {
    layout.expanded_at = layout.bytes;
    layout.bytes += expanded_layout(args, run, max_tokens_of(args, limits)).bytes;
  }
  if (!needs_key_offsets(args, plan.kind)) return layout;
  layout.key_offsets_at = layout.bytes;
  layout.bytes += key_offset_bytes(args, limits.total_q, max_tokens_of(args, limits));
  return layout;
}

int64_t most_queries(const CudaAttendBounds& bounds) {
  return std::min(bounds.max_total_q, int64_t{bounds.max_sequences} * bounds.max_q_len);
}
int64_t most_tokens(const AttendArgs& args, const CudaAttendBounds& bounds) {
  return bounds.max_tokens > 0 ? bounds.max_tokens
                               : args.max_blocks_per_sequence * args.packed.block_size;
}

// The bound of one run of heads. Either most_splits() and the budget's limit hold a plan below
// most_parts(), or its rows have as few splits as the kernel can have.
int64_t most_bytes_of_splits(const AttendArgs& args, const CudaAttendBounds& bounds,
                             const HeadRun& run, KernelKind kind) {
  const int64_t total_q = most_queries(bounds);
  const int64_t num_rows = total_q * args.num_q_heads;
  const int64_t num_tokens = most_tokens(args, bounds);
  const int64_t splits_of_tokens =
      std::clamp<int64_t>(ceil_div<int64_t>(num_tokens, kTileTokens), 1, kMaxSplits);
  const int64_t all_splits = splits_of_tokens + splits_of_sinks(args, kind);
  const bool balances = kind == KernelKind::kDecodeMma || kind == KernelKind::kLatent;
  const bool may_be_balanced =
      balances && args.window == 0 && bounds.max_sequences > 1 && num_tokens >= kLongSequence;
  const int64_t limit = most_parts(run.v.head_dim);
  int64_t parts = may_be_balanced ? limit : std::min(limit, num_rows * all_splits);
  const int64_t least_splits = 1 + splits_of_sinks(args, kind);
  const bool always_stores = kind == KernelKind::kReference || least_splits > 1;
  if (always_stores) parts = std::max(parts, num_rows * least_splits);
  if (!always_stores && all_splits == 1) parts = 0;
  return parts == 0 ? 0 : layout_of(parts, run.v.head_dim, bounds.max_sequences).bytes;
}

// The most bytes that a call within the bounds takes for rows that prefill reads in the place of
// blocks, for a run whose plan chose another kernel.
int64_t most_expanded_bytes(const AttendArgs& args, const CudaAttendBounds& bounds,
                            const HeadRun& run) {
  const int64_t num_rows =
      int64_t{bounds.max_q_len} * (args.num_q_heads / args.packed.num_kv_heads);
  if (!expands_for_prefill(run)) return 0;
  if (!joins_fragments(run) && num_rows <= kRowsOfPass * passes_of_expanding(run)) return 0;
  AttendArgs most = args;
  most.num_sequences = bounds.max_sequences;
  return std::min(expanded_layout(most, run, most_tokens(args, bounds)).bytes, kMostExpandedBytes);
}

// With K's block offsets, a call whose table would be too large takes the reference kernel.
int64_t most_bytes_of_run(const AttendArgs& args, const CudaAttendBounds& bounds,
                          const HeadRun& run, KernelKind kind) {
  const int64_t of_splits =
      most_bytes_of_splits(args, bounds, run, kind) + most_expanded_bytes(args, bounds, run);
  if (!needs_key_offsets(args, kind)) return of_splits;
  const int64_t table = key_offset_bytes(args, most_queries(bounds), most_tokens(args, bounds));
  if (table <= kMostOffsetBytes) return of_splits + table;
  return std::max(of_splits + kMostOffsetBytes,
                  most_bytes_of_splits(args, bounds, run, KernelKind::kReference));
}

}  // namespace

int64_t max_tokens_of(const AttendArgs& args, const CudaAttendLimits& limits) {
  const int64_t capacity = args.max_blocks_per_sequence * args.packed.block_size;
  return limits.max_tokens > 0 && limits.max_tokens < capacity ? limits.max_tokens : capacity;
}

bool choose_kernels(const CudaContext& context, const AttendArgs& args, int64_t num_rows,
                    CudaAttendPath path, CallPlan& plan) {
  // Of the fast kernels, only the latent ones read rows in segments.
  if (args.packed.next_segment != nullptr && path != CudaAttendPath::kReference) {
    const bool is_latent = path == CudaAttendPath::kLatent || path == CudaAttendPath::kLatentMma;
    if (path != CudaAttendPath::kChoose && !is_latent) return false;
    if (choose_latent(context, args, path, plan)) return true;
    if (is_latent) return false;
    path = CudaAttendPath::kReference;
  }
  switch (path) {
    case CudaAttendPath::kReference:
      choose_reference(args, plan);
      return true;
    case CudaAttendPath::kDecodeMma:
      return choose_decode_mma(context, args, num_rows, plan);
    case CudaAttendPath::kLatent:
    case CudaAttendPath::kLatentMma:
      return choose_latent(context, args, path, plan);
    case CudaAttendPath::kPrefill:
    case CudaAttendPath::kPrefillMma:
      return choose_prefill(context, args, engine_of(context, path), plan);
    case CudaAttendPath::kChoose:
      if (!choose_latent(context, args, path, plan) &&
          !prefers_prefill(context, args, num_rows, plan) &&
          !choose_decode_mma(context, args, num_rows, plan)) {
        choose_reference(args, plan);
      }
      return true;
  }
  return false;
}

int64_t most_workspace_bytes(const AttendArgs& args, const CudaAttendBounds& bounds,
                             const CallPlan& plan) {
  int64_t most = 0;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    most = std::max(most, most_bytes_of_run(args, bounds, args.packed.runs[i], plan.runs[i].kind));
  }
  return most;
}

bool plan_attend(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
                 CudaAttendPath path, CallPlan& plan) {
  // Query rows of a sequence and KV head.
  const int64_t num_rows =
      int64_t{limits.max_q_len} * (args.num_q_heads / args.packed.num_kv_heads);
  if (!choose_kernels(context, args, num_rows, path, plan)) return false;
  if (expanded_bytes(args, limits, plan) > kMostExpandedBytes) {
    if (path != CudaAttendPath::kChoose) return false;
    const bool joins = std::ranges::any_of(args.packed.runs, joins_fragments);
    if (joins || !choose_decode_mma(context, args, num_rows, plan)) choose_reference(args, plan);
  }
  if (needs_key_offsets(args, plan.kind()) &&
      key_offset_bytes(args, limits.total_q, max_tokens_of(args, limits)) > kMostOffsetBytes) {
    if (path != CudaAttendPath::kChoose) return false;
    choose_reference(args, plan);
  }
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const HeadRun& run = args.packed.runs[i];
    RunPlan& of_run = plan.runs[i];
    cut_into_work_tiles(context, args, limits, run, num_rows, of_run);
    if (of_run.kind == KernelKind::kReference) {
      of_run.reference = plan_reference_launch(args.packed.key_dim(), run.v.head_dim,
                                               args.transform.k.block_offset != nullptr,
                                               context.device.shared_bytes_per_cta);
    }
    of_run.grid = grid_of(args, run, of_run);
    // The reference kernel always stores partial results.
    of_run.needs_merge = of_run.kind == KernelKind::kReference || of_run.work_tiles.is_merged();
    of_run.workspace = workspace_of(args, limits, run, of_run);
  }
  return true;
}

}  // namespace kvx::ops::cuda
