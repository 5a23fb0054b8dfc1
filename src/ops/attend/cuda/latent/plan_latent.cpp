// The latent kernels' calls: rows of 576 numbers, the first 512 of which are the value, in one
// segment or in two.
#include "ops/attend/cuda/latent/plan_latent.hpp"

#include <bit>
#include <cstdlib>

#include "device/cuda.hpp"
#include "ops/attend/cuda/common/tile_side.hpp"
#include "ops/attend/cuda/formats.hpp"
#include "ops/side_rows.hpp"

namespace kvx::ops::cuda {
namespace {

// A V that is no part of K's rows has bytes of its own.
bool is_prefix_of_k(const HeadRun& run) {
  const CodeAddress &k = run.k.codes, &v = run.v.codes;
  return run.v.is_alias ||
         (run.v.spec == run.k.spec && v.base == k.base && v.block_stride == k.block_stride &&
          v.token_stride == k.token_stride && v.head_stride == k.head_stride);
}

// Whether 16 codes beside each other have one scale, which a shift finds.
bool has_groups_of_chunks(const format::FormatSpec& spec) {
  return spec.group_size == format::kWholeRow ||
         (spec.group_size >= 16 && std::has_single_bit(static_cast<unsigned>(spec.group_size)));
}

// Whether the kernel's operands can hold the numbers, as f16 where they are packed. One scale of a
// head multiplies sums; scales of groups and rows, numbers on their way.
bool fits_operands(const SideView& rows) {
  switch (tensor_core_format(rows.spec.facts->id).scale_path) {
    case ScalePath::kNone:
    case ScalePath::kAffine:
    case ScalePath::kOperand:
      return !rows.is_interleaved;
    case ScalePath::kRow:
      return rows.spec.scale_type == format::ScaleType::kF32 && has_groups_of_chunks(rows.spec);
    case ScalePath::kGroups64:
      return rows.spec.scale_type == format::ScaleType::kF16 && rows.spec.group_size == 64;
    case ScalePath::kRowF16:
      return false;
  }
  return false;
}

// Codes are copied 16 bytes at a time, as rows without scales are.
bool can_copy_codes(SideView rows, int block_size, int num_heads) {
  rows.spec = format::make_spec(format::FormatId::kBF16).value();
  return can_copy(rows, block_size, num_heads, false);
}

// Scales are read where they lie: those of a row beside each other, two bytes at a time, or four of
// an affine row or of binary32. A block's stride is computed with in 32 bits, the rest of a block
// in 31.
bool can_read_scales(const SideView& rows, int block_size, int num_heads) {
  if (!rows.spec.has_scale() || has_shared_scale(rows)) return true;
  const ScaleAddress& s = rows.scales;
  const int group_bytes = format::scale_bytes_per_group(rows.spec);
  const int row_bytes = format::scale_bytes_per_row(rows.spec, rows.head_dim);
  if (row_bytes != group_bytes && s.group_stride != group_bytes) return false;
  const bool is_word = rows.spec.is_affine() || rows.spec.scale_type == format::ScaleType::kF32;
  const int bytes = is_word ? 4 : 2;
  for (const int64_t x :
       {reinterpret_cast<int64_t>(s.base), s.block_stride, s.token_stride, s.head_stride}) {
    if (x % bytes != 0) return false;
  }
  const int64_t inside =
      std::abs(s.token_stride) * block_size + std::abs(s.head_stride) * num_heads;
  return s.block_stride >= 0 && s.block_stride <= UINT32_MAX && inside < INT32_MAX / 2;
}

bool can_copy_16_bits(const SideView& rows, int dim, int block_size, int num_heads) {
  return rows.head_dim == dim && rows.spec.facts->element_bits == 16 &&
         can_copy(rows, block_size, num_heads, false);
}

// Whether the numbers behind the value are a segment of 16 bits, copied as they are.
bool can_copy_segment(const LayerView& layer, const HeadRun& run) {
  const HeadRun* segment = second_segment(layer, run);
  if (segment == nullptr || layer.next_segment->next_segment != nullptr) return false;
  return segment->first_head == run.first_head && segment->num_heads == run.num_heads &&
         run.k.head_dim == kLatentValueDim &&
         can_copy_16_bits(segment->k, kLatentRestDim, layer.block_size, run.num_heads);
}

// Whether the full-precision window's rows are bf16, in one segment or two, and can be copied.
bool can_copy_window(const LayerView& window) {
  if (window.runs.size() != 1) return false;
  const HeadRun& run = window.runs.front();
  if (run.k.spec.facts->id != format::FormatId::kBF16 || !is_prefix_of_k(run) ||
      run.v.head_dim != kLatentValueDim)
    return false;
  const bool is_whole = window.next_segment == nullptr;
  const int dim = is_whole ? kLatentKeyDim : kLatentValueDim;
  if (!can_copy_16_bits(run.k, dim, window.block_size, run.num_heads)) return false;
  return is_whole || (window.next_segment->runs.size() == 1 && can_copy_segment(window, run) &&
                      second_segment(window, run)->k.spec == run.k.spec);
}

// Whether both kernels, but for what they say themselves, accept a run.
bool accepts_latent_rows(const AttendArgs& args, const HeadRun& run) {
  const bool is_plain = args.window_sinks == 0 && args.transform.k.block_offset == nullptr;
  if (!is_plain || !is_prefix_of_k(run) || !fits_operands(run.k) ||
      !can_copy_codes(run.k, args.packed.block_size, run.num_heads) ||
      !can_read_scales(run.k, args.packed.block_size, run.num_heads))
    return false;
  return args.packed.key_dim() == kLatentKeyDim && run.v.head_dim == kLatentValueDim &&
         (second_segment(args.packed, run) == nullptr || can_copy_segment(args.packed, run));
}

LatentFormats formats_of(const LayerView& layer, const HeadRun& run) {
  const HeadRun* segment = second_segment(layer, run);
  const SideView& rest = segment == nullptr ? run.k : segment->k;
  return {
      .id = run.k.spec.facts->id, .rest = rest.spec.facts->id, .has_segments = segment != nullptr};
}

// A producer's warp of the kernel with wgmma takes 16 tokens of one block.
LatentKernel wgmma_instance(const CudaContext& context, const AttendArgs& args,
                            const HeadRun& run) {
  const bool is_accepted = device::cuda_code_version(context.device) == 90 &&
                           args.transform.k.is_identity() && args.transform.v.is_identity() &&
                           args.num_sink_blocks == nullptr &&
                           args.packed.block_size % kTileTokens == 0;
  return is_accepted ? find_latent_kernel(formats_of(args.packed, run)) : LatentKernel{};
}

LatentKernel mma_instance(const AttendArgs& args, const HeadRun& run) {
  const bool is_accepted = args.num_sink_blocks == nullptr || can_copy_window(args.full_precision);
  return is_accepted ? find_latent_mma_kernel(formats_of(args.packed, run)) : LatentKernel{};
}

}  // namespace

const HeadRun* second_segment(const LayerView& layer, const HeadRun& run) {
  const LayerView* next = layer.next_segment;
  return next == nullptr ? nullptr : &run_of_head(*next, run.first_head);
}

LatentKernel latent_instance(const CudaContext& context, const AttendArgs& args, const HeadRun& run,
                             bool may_have_wgmma) {
  if (!accepts_latent_rows(args, run)) return {};
  LatentKernel kernel;
  if (may_have_wgmma) kernel = wgmma_instance(context, args, run);
  if (kernel.function == nullptr) kernel = mma_instance(args, run);
  return kernel.shared_bytes <= context.device.shared_bytes_per_cta ? kernel : LatentKernel{};
}

int latent_scale_shift(const format::FormatSpec& spec) {
  constexpr int kPastAllNumbers = 16;
  if (!spec.has_scale() || spec.group_size == format::kWholeRow) return kPastAllNumbers;
  return std::bit_width(static_cast<unsigned>(spec.group_size)) - 1;
}

void plan_latent(const CudaContext& context, const AttendArgs& args, SplitShape shape,
                 int64_t most_parts, WorkTilePlan& plan) {
  // Tokens that a CTA could attend to in the time of its queries, first copies and outputs; and in
  // that of a launch that merges.
  constexpr double kOverheadTokens = 256;
  const LatentKernel& kernel = plan.latent;
  shape.num_slots = context.device.num_multiprocessors;  // one CTA each
  shape.granule = kernel.step_tokens;
  shape.overhead = kOverheadTokens / kernel.step_tokens;
  shape.merge = kOverheadTokens / kernel.step_tokens;
  plan.num_splits = plan_splits(shape).num_splits;
  constexpr int64_t kWorkTilesOfSequence = 3;
  if (args.num_sequences < 2 || args.window > 0 || shape.max_tokens < kLongSequence) return;
  const int64_t tiles_of_sequence = shape.num_work_tiles / args.num_sequences;
  const int64_t waves = ceil_div(kWorkTilesOfSequence * shape.num_work_tiles, shape.num_slots);
  const int64_t parts_of_budget = tiles_of_sequence * kernel.rows;
  const int64_t budget =
      std::min(waves * shape.num_slots / tiles_of_sequence, most_parts / parts_of_budget);
  if (budget >= 2 * int64_t{args.num_sequences})
    plan.balanced_work_tiles = static_cast<int>(budget);
}

}  // namespace kvx::ops::cuda
