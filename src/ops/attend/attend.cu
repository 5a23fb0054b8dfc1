// attend on a GPU: chooses the kernel, plans the splits, hands out the workspace and launches.
#include <cuda_runtime.h>

#include <cmath>
#include <numeric>

#include "core/checked.hpp"
#include "device/cuda_error.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cuda/job.cuh"
#include "ops/attend/cuda/launch.hpp"
#include "ops/attend/cuda/plan_pieces.hpp"
#include "ops/attend/cuda/prefill_launch.hpp"
#include "ops/cuda/chunk.cuh"
#include "ops/cuda/overlapping_launch.cuh"
#include "ops/side_rows.hpp"

namespace kvx::ops {
namespace {

using cuda::AttendJob;
using cuda::AttendPlanCuda;
using cuda::PrefillEngine;
using cuda::PrefillKernel;
using cuda::TileKernel;
using format::ScaleType;

constexpr int64_t kWorkspaceAlignment = 256;

bool divides(int64_t value, int64_t by) {
  return value % by == 0;
}

// Whether strides are what a tile's copies compute with: a block's in 32 bits, the rest of a block
// in 31.
template <class Address>
bool fits_in_32_bits(const Address& a, int block_size, int num_heads) {
  const int64_t inside =
      std::abs(a.token_stride) * block_size + std::abs(a.head_stride) * num_heads;
  return a.block_stride >= 0 && a.block_stride <= UINT32_MAX && inside < INT32_MAX / 2 &&
         std::abs(a.token_stride) < INT32_MAX / 2 && std::abs(a.head_stride) < INT32_MAX / 2;
}

// Whether all rows lie on so many bytes.
template <class Address>
bool lies_on(const Address& a, int bytes) {
  return divides(reinterpret_cast<intptr_t>(a.base), bytes) && divides(a.block_stride, bytes) &&
         divides(a.token_stride, bytes) && divides(a.head_stride, bytes);
}

// By what padded tiles' copies take codes: no unit reaches past a row's end.
int copy_unit_bytes(const SideView& side) {
  const bool is_in_16s = divides(format::code_bytes_per_row(side.spec, side.head_dim), 16);
  return is_in_16s && lies_on(side.codes, 16) ? 16 : 8;
}

// Whether the tiles' copies can take the rows as they lie. is_padded: by instances for longer rows,
// which copy rows of four bits on 8 bytes too.
bool can_copy(const SideView& side, int block_size, int num_heads, bool is_padded) {
  const CodeAddress& c = side.codes;
  const int unit_bytes = is_padded && side.spec.facts->element_bits == 4 ? 8 : 16;
  const bool codes_fit = lies_on(c, unit_bytes) && fits_in_32_bits(c, block_size, num_heads);
  if (!codes_fit || !side.spec.has_scale()) return codes_fit;
  const ScaleAddress& s = side.scales;
  const int group_bytes = format::scale_bytes_per_group(side.spec);
  const int row_bytes = format::scale_bytes_per_row(side.spec, side.head_dim);
  // A row's scales lie together; rows that are not copied in fours follow each other.
  const bool row_fits =
      (row_bytes == group_bytes || s.group_stride == group_bytes) &&
      (divides(row_bytes, 4) ? divides(s.token_stride, 4) : s.token_stride == row_bytes);
  return row_fits && divides(reinterpret_cast<intptr_t>(s.base), 4) && divides(s.block_stride, 4) &&
         divides(s.head_stride, 4) && fits_in_32_bits(s, block_size, num_heads);
}

// The kernel's instances have f16 scales for groups of 64 in the symmetric integers.
bool has_tile_scales(const format::FormatSpec& spec) {
  using format::FormatId;
  if (spec.facts->id != FormatId::kInt8 && spec.facts->id != FormatId::kInt4) return true;
  return spec.scale_type == ScaleType::kF16 && spec.group_size == 64;
}

// Rows of a head follow each other inside a block, and so do their scales, all on 16 bytes.
bool is_dense(const SideView& side) {
  const int code_bytes = format::code_bytes_per_row(side.spec, side.head_dim);
  if (side.codes.token_stride != code_bytes) return false;
  if (!side.spec.has_scale()) return true;
  const ScaleAddress& s = side.scales;
  return s.token_stride == format::scale_bytes_per_row(side.spec, side.head_dim) &&
         divides(reinterpret_cast<intptr_t>(s.base), 16) && divides(s.block_stride, 16) &&
         divides(s.head_stride, 16);
}

// One scale a head (or for all heads), the same for all blocks and tokens.
bool has_shared_scale(const SideView& side) {
  return side.spec.has_scale() && side.scales.block_stride == 0 && side.scales.token_stride == 0 &&
         divides(side.scales.head_stride, 4);
}

// Whether the wide ends are what the kernels know beside packed tokens: bf16.
bool has_tile_ends(const AttendArgs& args, const HeadRun& run) {
  if (args.wide.runs.size() != 1) return false;
  const HeadRun& wide = args.wide.runs.front();
  if (wide.k.head_dim != run.k.head_dim || wide.v.head_dim != run.v.head_dim) return false;
  for (const SideView* side : {&wide.k, &wide.v}) {
    const bool is_known = side->spec.facts->id == format::FormatId::kBF16;
    if (!is_known || !can_copy(*side, args.packed.block_size, wide.num_heads, false)) return false;
  }
  return true;
}

// Whether the tensor cores' kernels can take the run, if an instance is compiled.
bool can_have_tiles(const AttendArgs& args, const HeadRun& run) {
  const int block_size = args.packed.block_size;
  if (args.transform.k.block_offset || block_size % 16 != 0) return false;
  if (args.window_sinks > 0) return false;
  const bool is_padded = !cuda::has_exact_tiles(run.k.head_dim, run.v.head_dim);
  for (const SideView* side : {&run.k, &run.v}) {
    const bool fits = can_copy(*side, block_size, run.num_heads, is_padded);
    if (!fits || !has_tile_scales(side->spec)) return false;
  }
  return true;
}

// Whether bulk copies take the rows, and a step of theirs lies in one block: in shorter ones each
// lane that copies a block costs its warp a turn. Wide ends go with bulk copies all the same: the
// other instances for four bits do not take them.
bool has_dense_rows(const AttendArgs& args, const HeadRun& run) {
  constexpr int kStepTokens = 64;
  const bool is_whole = args.packed.block_size % kStepTokens == 0 || args.wide_head_blocks;
  return is_whole && is_dense(run.k) && is_dense(run.v);
}

// Bulk copies came with 9.0; code for older devices may serve a newer one.
bool has_bulk_copies(const CudaContext& context) {
  return device::cuda_code_version(context.device) >= 90;
}

// wgmma is in code made for 9.0 and in no other.
bool has_wgmma(const CudaContext& context) {
  return device::cuda_code_version(context.device) == 90;
}

// num_rows: query rows of a sequence and KV head. has_bulk: whether bulk copies can be used.
TileKernel tile_kernel_for(const AttendArgs& args, const HeadRun& run, int64_t num_rows,
                           bool has_bulk) {
  if (!can_have_tiles(args, run)) return {};
  const TileKernel kernel = cuda::find_tile_kernel(
      run.k.spec.facts->id, run.v.spec.facts->id,
      {.key_dim = run.k.head_dim,
       .value_dim = run.v.head_dim,
       .has_dense_rows = has_bulk && has_dense_rows(args, run),
       .has_shared_scales = has_shared_scale(run.k) && has_shared_scale(run.v),
       .has_many_rows = num_rows > cuda::kTileRows,
       .has_wide_ends = args.wide_head_blocks != nullptr});
  const bool fits = !args.wide_head_blocks || (kernel.takes_wide && has_tile_ends(args, run));
  return fits ? kernel : TileKernel{};
}

bool is_prefill(CudaAttendPath path) {
  return path == CudaAttendPath::kPrefill || path == CudaAttendPath::kPrefillMma;
}

// path: one of the two.
PrefillKernel prefill_kernel_for(const CudaContext& context, const AttendArgs& args,
                                 const HeadRun& run, CudaAttendPath path) {
  if (args.tree_mask || run.k.head_dim != run.v.head_dim || !can_have_tiles(args, run)) return {};
  if (!cuda::fits_chunks(args.q) || !cuda::fits_chunks(args.out)) return {};
  const bool has_wide_ends = args.wide_head_blocks != nullptr;
  if (has_wide_ends && !has_tile_ends(args, run)) return {};
  const bool is_wgmma = path == CudaAttendPath::kPrefill && has_wgmma(context);
  const PrefillKernel kernel = cuda::find_prefill_kernel(
      is_wgmma ? PrefillEngine::kWgmma : PrefillEngine::kMmaSync,
      {run.k.spec.facts->id, has_shared_scale(run.k)},
      {run.v.spec.facts->id, has_shared_scale(run.v)}, run.k.head_dim, has_wide_ends);
  return kernel.shared_bytes <= context.device.shared_bytes_per_cta ? kernel : PrefillKernel{};
}

bool every_run_has_prefill(const CudaContext& context, const AttendArgs& args,
                           CudaAttendPath path) {
  for (const HeadRun& run : args.packed.runs) {
    if (!prefill_kernel_for(context, args, run, path).function) return false;
  }
  return true;
}

bool every_run_has_tiles(const CudaContext& context, const AttendArgs& args) {
  for (const HeadRun& run : args.packed.runs) {
    if (!tile_kernel_for(args, run, 1, has_bulk_copies(context)).function) return false;
  }
  return true;
}

int64_t max_tokens_of(const AttendArgs& args, const CudaAttendLimits& limits) {
  const int64_t capacity = args.max_blocks_per_sequence * args.packed.block_size;
  return limits.max_tokens > 0 && limits.max_tokens < capacity ? limits.max_tokens : capacity;
}

// Query rows of a sequence and KV head.
int64_t max_rows_of(const AttendArgs& args, const CudaAttendLimits& limits) {
  return int64_t{limits.max_q_len} * (args.num_q_heads / args.packed.num_kv_heads);
}

AttendPlanCuda plan_run(const CudaContext& context, const AttendArgs& args,
                        const CudaAttendLimits& limits, const HeadRun& run, CudaAttendPath path) {
  AttendPlanCuda plan;
  const int64_t num_rows = max_rows_of(args, limits);
  int rows_of_piece = cuda::kPlainRows;
  if (path == CudaAttendPath::kTiles) {
    plan.tiles = tile_kernel_for(args, run, num_rows, has_bulk_copies(context));
    rows_of_piece = plan.tiles.rows;
  } else if (is_prefill(path)) {
    plan.prefill = prefill_kernel_for(context, args, run, path);
    rows_of_piece = cuda::kPrefillRows;
  }
  plan.num_row_tiles = static_cast<int>(ceil_div<int64_t>(num_rows, rows_of_piece));
  SplitShape shape;
  shape.num_pieces = int64_t{args.num_sequences} * run.num_heads * plan.num_row_tiles;
  shape.max_tokens = max_tokens_of(args, limits);
  if (args.window > 0) {
    const int64_t most_seen = int64_t{args.window_sinks} + args.window + limits.max_q_len;
    shape.max_tokens = std::min(shape.max_tokens, most_seen);
  }
  if (path == CudaAttendPath::kTiles) {
    cuda::plan_tiles(context, shape, plan);
    if (args.window == 0) cuda::balance_tiles(context, shape, args.num_sequences, plan);
  } else if (is_prefill(path)) {
    cuda::plan_prefill(context, shape, plan);
  } else {
    constexpr int kPlainCtas = 2;  // a multiprocessor
    shape.num_slots = int64_t{context.device.num_multiprocessors} * kPlainCtas;
    shape.granule = 64;
    plan.num_splits = plan_splits(shape).num_splits;
  }
  return plan;
}

// Whether a kernel takes the call.
bool takes(CudaAttendPath path, const CudaContext& context, const AttendArgs& args) {
  if (path == CudaAttendPath::kTiles) return every_run_has_tiles(context, args);
  return !is_prefill(path) || every_run_has_prefill(context, args, path);
}

// The fastest that takes the call. From so many query rows a KV head on, a prefill kernel's tile of
// 128 rows costs less than the tile kernel's passes over the cache.
CudaAttendPath choose_path(const CudaContext& context, const AttendArgs& args,
                           const CudaAttendLimits& limits) {
  constexpr int kPrefillFrom = 33;
  const bool has_many_rows = max_rows_of(args, limits) >= kPrefillFrom;
  if (has_many_rows && takes(CudaAttendPath::kPrefill, context, args)) {
    return CudaAttendPath::kPrefill;
  }
  return takes(CudaAttendPath::kTiles, context, args) ? CudaAttendPath::kTiles
                                                      : CudaAttendPath::kPlain;
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

Status check_view(const char* name, const LayerView& view) {
  if (view.block_size <= 0 || view.num_kv_heads <= 0 || view.runs.empty()) {
    return invalid_argument("{} has block_size {}, {} KV heads in {} runs; expected at least 1",
                            name, view.block_size, view.num_kv_heads, view.runs.size());
  }
  for (const HeadRun& run : view.runs) {
    for (const SideView* side : {&run.k, &run.v}) {
      const bool has_codes = side->codes.base || view.num_blocks == 0;
      if (side->head_dim <= 0 || side->head_dim > format::kMaxHeadDim || !has_codes) {
        return invalid_argument(
            "{}.{} has head_dim {}, codes {}; attention needs 1 to {} and codes", name,
            side == &run.k ? "k" : "v", side->head_dim, side->codes.base ? "there" : "null",
            format::kMaxHeadDim);
      }
    }
  }
  return {};
}

// What can be checked without the lengths, which are on the device.
Status check(const AttendArgs& args, const CudaAttendLimits& limits) {
  KVX_RETURN_IF_ERROR(check_view("packed", args.packed));
  if ((args.wide_head_blocks == nullptr) != (args.wide_tail_block == nullptr)) {
    return invalid_argument("{} is null; wide ends need wide_head_blocks and wide_tail_block",
                            args.wide_head_blocks ? "wide_tail_block" : "wide_head_blocks");
  }
  if (args.wide_head_blocks) {
    KVX_RETURN_IF_ERROR(check_view("wide", args.wide));
    if (args.wide.runs.size() != 1) {
      return unsupported("wide has {} runs of heads; attend on CUDA takes 1",
                         args.wide.runs.size());
    }
  }
  if (args.num_q_heads <= 0 || args.num_q_heads % args.packed.num_kv_heads != 0) {
    return invalid_argument("num_q_heads is {}; expected a positive multiple of num_kv_heads {}",
                            args.num_q_heads, args.packed.num_kv_heads);
  }
  if (!std::isfinite(args.softmax_scale) || !std::isfinite(args.softcap) || args.softcap < 0) {
    return invalid_argument("softmax_scale is {}, softcap {}; expected finite, softcap 0 or more",
                            args.softmax_scale, args.softcap);
  }
  if (args.window < 0) {
    return invalid_argument("window is {}; expected 0 (none) or at least 1", args.window);
  }
  if (args.window_sinks < 0 || (args.window_sinks > 0 && args.window == 0)) {
    return invalid_argument("window_sinks is {} with a window of {}; expected 0 or more, 0 without",
                            args.window_sinks, args.window);
  }
  constexpr int kMaxSequences = 65535;
  if (args.num_sequences < 0 || args.num_sequences > kMaxSequences) {
    return invalid_argument("num_sequences is {}; expected 0 to {}", args.num_sequences,
                            kMaxSequences);
  }
  const int64_t most = int64_t{args.num_sequences} * limits.max_q_len;
  if (limits.max_q_len < 1 || limits.total_q < 0 || limits.total_q > most) {
    return invalid_argument("max_q_len is {}, total_q {}; expected 1 or more, and 0 to {}",
                            limits.max_q_len, limits.total_q, most);
  }
  const void* needed[] = {args.seq_lens, args.q_starts, args.block_table.ids, args.q.data,
                          args.out.data};
  const char* names[] = {"seq_lens", "q_starts", "block_table", "q", "out"};
  for (int i = 0; i < 5 && limits.total_q > 0; ++i) {
    if (!needed[i]) return invalid_argument("{} is null", names[i]);
  }
  return {};
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

template <class Address>
cuda::TileRegion tile_region(const Address& a) {
  return {a.base, static_cast<uint32_t>(a.block_stride), static_cast<int>(a.token_stride),
          static_cast<int>(a.head_stride)};
}

// tiles_at_once: of a warp's step.
cuda::TileSide tile_side(const SideView& side, int block_size, int tiles_at_once) {
  const CodeAddress& c = side.codes;
  const ScaleAddress& s = side.scales;
  const int64_t code_bytes = int64_t{block_size} * c.token_stride;
  const int scale_row_bytes =
      side.spec.has_scale() ? format::scale_bytes_per_row(side.spec, side.head_dim) : 0;
  const bool has_scales_behind = s.base == c.base + code_bytes &&
                                 s.block_stride == c.block_stride && s.head_stride == c.head_stride;
  return {.codes = tile_region(c),
          .scales = tile_region(s),
          .is_step = block_size == tiles_at_once * cuda::kTileTokens && has_scales_behind,
          .has_scales_on_8 = lies_on(s, 8),
          .row_bytes = format::code_bytes_per_row(side.spec, side.head_dim),
          .scale_row_bytes = scale_row_bytes,
          .unit_bytes = copy_unit_bytes(side)};
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
  job.q_per_kv = args.num_q_heads / args.packed.num_kv_heads;
  job.total_q = limits.total_q;
  job.max_tokens = max_tokens_of(args, limits);
  job.max_q_len = limits.max_q_len;
  job.args = args;
  job.num_row_tiles = plan.num_row_tiles;
  job.num_splits = plan.num_splits;
  job.balanced_pieces = plan.balanced_pieces;
  job.piece_granule = plan.tiles.step_tokens * plan.warps_of_cta;
  job.rows_of_piece = plan.tiles.rows;
  const WorkspaceBytes bytes = workspace_bytes(args, limits, run, plan);
  job.partial_out = reinterpret_cast<float*>(workspace);
  job.partial_softmax = reinterpret_cast<cuda::Softmax2*>(workspace + bytes.out);
  job.sequence_pieces =
      reinterpret_cast<cuda::SequencePieces*>(workspace + bytes.out + bytes.softmax);
  job.findings = findings;
  job.tile_k = tile_side(run.k, job.block_size, plan.tiles.tiles_at_once);
  job.tile_v = tile_side(run.v, job.block_size, plan.tiles.tiles_at_once);
  job.transforms_k = !args.transform.k.is_identity();
  job.transforms_v = !args.transform.v.is_identity();
  if (args.wide_head_blocks) {
    const HeadRun& wide = args.wide.runs.front();
    job.tile_wide_k = tile_side(wide.k, job.block_size, 1);
    job.tile_wide_v = tile_side(wide.v, job.block_size, 1);
  }
  job.tiles_per_block = args.packed.block_size / cuda::kTileTokens;
  job.tiles_per_copy = std::gcd(job.tiles_per_block, plan.tiles.tiles_at_once);
  const bool shares_k = has_shared_scale(run.k) && run.k.spec.scale_type == ScaleType::kF32;
  const bool shares_v = has_shared_scale(run.v) && run.v.spec.scale_type == ScaleType::kF32;
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

namespace cuda {

cudaError_t launch_attend_tiles(const CudaContext& context, const TileKernel& kernel,
                                int warps_of_cta, const AttendJob& job) {
  const int shared_bytes = warps_of_cta * kernel.warp_shared_bytes;
  const cudaError_t set = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (set != cudaSuccess) return set;
  const auto heads = static_cast<unsigned>(job.packed.num_heads * job.num_row_tiles);
  const dim3 grid = job.balanced_pieces > 0
                        ? dim3(static_cast<unsigned>(job.balanced_pieces) * heads)
                        : dim3(job.num_splits, heads, job.args.num_sequences);
  return launch_overlapping(context, kernel.function, {grid, warps_of_cta * kWarp, shared_bytes},
                            &job);
}

}  // namespace cuda

bool attend_has_tiles(const CudaContext& context, const AttendArgs& args) {
  return every_run_has_tiles(context, args);
}

bool attend_has_prefill(const CudaContext& context, const AttendArgs& args) {
  return every_run_has_prefill(context, args, CudaAttendPath::kPrefill);
}

int64_t attend_workspace_bytes(const CudaContext& context, const AttendArgs& args,
                               const CudaAttendLimits& limits, CudaAttendPath path) {
  if (!takes(path, context, args)) return 0;
  if (path == CudaAttendPath::kChoose) {
    path = choose_path(context, args, limits);
    // The call's q and out may lie where that kernel does not take them.
    const bool has_tiles = takes(CudaAttendPath::kTiles, context, args);
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
  KVX_RETURN_IF_ERROR(check(args, limits));
  if (!takes(path, context, args)) {
    return unsupported("no {} kernel takes this call (attend_has_{})",
                       path == CudaAttendPath::kTiles ? "tensor core" : "prefill",
                       path == CudaAttendPath::kTiles ? "tiles" : "prefill");
  }
  if (args.num_sequences == 0 || limits.total_q == 0) return {};
  KVX_RETURN_IF_ERROR(check_shared_memory(context, args));
  if (path == CudaAttendPath::kChoose) path = choose_path(context, args, limits);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  for (const HeadRun& run : args.packed.runs) {
    const AttendPlanCuda plan = plan_run(context, args, limits, run, path);
    const AttendJob job = make_job(args, limits, run, plan, workspace, findings);
    const cudaError_t launched =
        is_prefill(path) ? cuda::launch_attend_prefill(plan.prefill, job, stream)
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
