// What each attention kernel asks of a call: formats, head_dims, where rows lie, what the device
// has.
#include "ops/attend/cuda/choose_kernel.hpp"

#include <algorithm>

#include "ops/attend/cuda/common/tile_side.hpp"
#include "ops/cuda/fits_chunks.hpp"

namespace kvx::ops::cuda {
namespace {

// The kernel's instances have f16 scales for groups of 64 in the symmetric integers.
bool has_tile_scales(const format::FormatSpec& spec) {
  using format::FormatId;
  if (spec.facts->id != FormatId::kInt8 && spec.facts->id != FormatId::kInt4) return true;
  return spec.scale_type == format::ScaleType::kF16 && spec.group_size == 64;
}

// Whether the full-precision window are what the kernels know beside packed tokens: bf16.
bool has_tile_window(const AttendArgs& args, const HeadRun& run) {
  if (args.full_precision.runs.size() != 1) return false;
  const HeadRun& full_precision = args.full_precision.runs.front();
  if (full_precision.k.head_dim != run.k.head_dim || full_precision.v.head_dim != run.v.head_dim)
    return false;
  for (const SideView* side : {&full_precision.k, &full_precision.v}) {
    const bool is_known = side->spec.facts->id == format::FormatId::kBF16;
    if (!is_known || !can_copy(*side, args.packed.block_size, full_precision.num_heads, false))
      return false;
  }
  return true;
}

// Whether the tensor cores' kernels can take the run, if an instance is compiled.
bool can_have_decode_mma(const AttendArgs& args, const HeadRun& run) {
  const int block_size = args.packed.block_size;
  if (args.transform.k.block_offset || block_size % 16 != 0) return false;
  const bool is_padded = !has_exact_tiles(run.k.head_dim, run.v.head_dim);
  for (const SideView* side : {&run.k, &run.v}) {
    const bool fits = can_copy(*side, block_size, run.num_heads, is_padded);
    if (!fits || !has_tile_scales(side->spec)) return false;
  }
  return true;
}

// Whether bulk copies take the rows, and a step of theirs lies in one block: in shorter ones each
// lane that copies a block costs its warp a turn.
bool has_dense_rows(const AttendArgs& args, const HeadRun& run) {
  constexpr int kStepTokens = kSideStepTiles * kTileTokens;
  return args.packed.block_size % kStepTokens == 0 && is_dense(run.k) && is_dense(run.v);
}

// Bulk copies came with 9.0; code for older devices may serve a newer one.
bool has_bulk_copies(const CudaContext& context) {
  return device::cuda_code_version(context.device) >= 90;
}

// wgmma, and instances for codes in interleaved order, are in code made for 9.0 and in no other.
bool is_hoppers_code(const CudaContext& context) {
  return device::cuda_code_version(context.device) == 90;
}

}  // namespace

DecodeMmaKernel decode_mma_kernel_for(const CudaContext& context, const AttendArgs& args,
                                      const HeadRun& run, int64_t num_rows) {
  const bool is_interleaved = run.k.is_interleaved;
  if (run.v.is_interleaved != is_interleaved || (is_interleaved && !is_hoppers_code(context)))
    return {};
  if (!can_have_decode_mma(args, run)) return {};
  const DecodeMmaKernel kernel = find_decode_mma_kernel(
      run.k.spec.facts->id, run.v.spec.facts->id,
      {.key_dim = run.k.head_dim,
       .value_dim = run.v.head_dim,
       .has_dense_rows = has_bulk_copies(context) && has_dense_rows(args, run),
       .has_shared_scales = has_shared_scale(run.k) && has_shared_scale(run.v),
       .has_many_rows = num_rows > kTileRows,
       .has_full_precision_window = args.num_sink_blocks != nullptr,
       .is_interleaved = is_interleaved});
  const bool fits =
      !args.num_sink_blocks || (kernel.takes_full_precision && has_tile_window(args, run));
  return fits ? kernel : DecodeMmaKernel{};
}

PrefillKernel prefill_kernel_for(const CudaContext& context, const AttendArgs& args,
                                 const HeadRun& run, CudaAttendPath path) {
  if (args.tree_mask || args.window_sinks > 0) return {};
  if (!can_have_decode_mma(args, run)) return {};
  if (!fits_chunks(args.q) || !fits_chunks(args.out)) return {};
  const PrefillDims dims = {run.k.head_dim, run.v.head_dim};
  // Longer rows' instances read nibbles.
  if ((run.k.is_interleaved || run.v.is_interleaved) && !dims.fit(128, 128)) return {};
  for (const SideView* side : {&run.k, &run.v}) {  // rows in whole copies of 16 bytes
    const int code_bytes = format::code_bytes_per_row(side->spec, side->head_dim);
    if (code_bytes % 16 != 0 || !can_copy(*side, args.packed.block_size, run.num_heads, false)) {
      return {};
    }
  }
  const bool has_full_precision_window = args.num_sink_blocks != nullptr;
  if (has_full_precision_window && !has_tile_window(args, run)) return {};
  const bool is_wgmma = path == CudaAttendPath::kPrefill && is_hoppers_code(context);
  const PrefillKernel kernel =
      find_prefill_kernel(is_wgmma ? PrefillEngine::kWgmma : PrefillEngine::kMmaSync,
                          {.k = {run.k.spec.facts->id, has_shared_scale(run.k)},
                           .v = {run.v.spec.facts->id, has_shared_scale(run.v)},
                           .dims = dims,
                           .has_full_precision_window = has_full_precision_window,
                           .may_round = args.q.dtype == DType::kBF16});
  return kernel.shared_bytes <= context.device.shared_bytes_per_cta ? kernel : PrefillKernel{};
}

namespace {

bool every_run_has_prefill(const CudaContext& context, const AttendArgs& args,
                           CudaAttendPath path) {
  for (const HeadRun& run : args.packed.runs) {
    if (!prefill_kernel_for(context, args, run, path).function) return false;
  }
  return true;
}

bool has_bits(const HeadRun& run, int bits) {
  return run.k.spec.facts->element_bits == bits && run.v.spec.facts->element_bits == bits;
}

// Whether a prefill kernel's tile of 128 rows costs less than the decode_mma kernel's passes over
// the cache, of up to 16 rows each (measured on an H200): than two of 16 bits, else three, or four
// of integers of 4 bits, whose scales go to every score.
bool has_rows_for_prefill(const CudaContext& context, const AttendArgs& args, int64_t num_rows) {
  const auto needs_more_than = [num_rows](int passes) {
    return num_rows > int64_t{2 * kTileRows} * passes;
  };
  if (!needs_more_than(1)) return false;
  if (!is_hoppers_code(context)) return needs_more_than(2);
  return std::ranges::all_of(args.packed.runs, [&](const HeadRun& run) {
    if (has_bits(run, 16)) return true;
    const bool is_slow =
        has_bits(run, 4) && has_exact_tiles(run.k.head_dim, run.v.head_dim) &&
        !prefill_kernel_for(context, args, run, CudaAttendPath::kPrefill).shares_scales;
    return needs_more_than(is_slow ? 3 : 2);
  });
}

bool every_run_has_decode_mma(const CudaContext& context, const AttendArgs& args) {
  for (const HeadRun& run : args.packed.runs) {
    if (!decode_mma_kernel_for(context, args, run, 1).function) return false;
  }
  return true;
}

}  // namespace

bool takes(CudaAttendPath path, const CudaContext& context, const AttendArgs& args) {
  if (path == CudaAttendPath::kDecodeMma) return every_run_has_decode_mma(context, args);
  return !is_prefill(path) || every_run_has_prefill(context, args, path);
}

CudaAttendPath choose_path(const CudaContext& context, const AttendArgs& args, int64_t num_rows) {
  if (has_rows_for_prefill(context, args, num_rows) &&
      takes(CudaAttendPath::kPrefill, context, args)) {
    return CudaAttendPath::kPrefill;
  }
  return takes(CudaAttendPath::kDecodeMma, context, args) ? CudaAttendPath::kDecodeMma
                                                          : CudaAttendPath::kReference;
}

}  // namespace kvx::ops::cuda
