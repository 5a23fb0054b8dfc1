// What must be equal in the calls of a plan.
#include "ops/attend/cuda/planned_shape.hpp"

#include <span>

#include "ops/cuda/fits_chunks.hpp"

namespace kvx::ops::cuda {
namespace {

// All that a kernel's choice and its cut into work tiles depend on of an address.
bool are_aligned_alike(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

bool have_equal_strides(const SideView& a, const SideView& b) {
  return a.codes.block_stride == b.codes.block_stride &&
         a.codes.token_stride == b.codes.token_stride &&
         a.codes.head_stride == b.codes.head_stride &&
         a.codes.fragment_stride == b.codes.fragment_stride &&
         a.codes.fragment_bytes == b.codes.fragment_bytes &&
         a.scales.block_stride == b.scales.block_stride &&
         a.scales.token_stride == b.scales.token_stride &&
         a.scales.head_stride == b.scales.head_stride &&
         a.scales.group_stride == b.scales.group_stride &&
         a.channels.block_stride == b.channels.block_stride &&
         a.channels.head_stride == b.channels.head_stride;
}

const char* difference(const SideView& a, const SideView& b) {
  if (!(a.spec == b.spec)) return "the format of a layer";
  if (a.head_dim != b.head_dim) return "the head_dim of a layer";
  if (a.is_interleaved != b.is_interleaved || a.is_alias != b.is_alias)
    return "the order of a layer's bytes";
  if (!have_equal_strides(a, b)) return "the strides of a layer";
  if (!are_aligned_alike(a.codes.base, b.codes.base) ||
      !are_aligned_alike(a.scales.base, b.scales.base) ||
      !are_aligned_alike(a.channels.base, b.channels.base))
    return "the alignment of a layer's codes, scales or channels on 16 bytes";
  return nullptr;
}

// The runs of the second segment of a layer's rows.
std::span<const HeadRun> more_runs(const LayerView& layer) {
  return layer.next_segment == nullptr ? std::span<const HeadRun>() : layer.next_segment->runs;
}

const char* difference(std::span<const HeadRun> a, std::span<const HeadRun> b) {
  if (a.size() != b.size()) return "the number of a layer's runs of heads";
  for (size_t i = 0; i < a.size(); ++i) {
    const HeadRun& x = a[i];
    const HeadRun& y = b[i];
    if (x.first_head != y.first_head || x.num_heads != y.num_heads)
      return "the heads of a layer's run";
    if (const char* found = difference(x.k, y.k)) return found;
    if (const char* found = difference(x.v, y.v)) return found;
  }
  return nullptr;
}

const char* difference(const LayerView& a, std::span<const HeadRun> runs_of_a,
                       std::span<const HeadRun> more_of_a, const LayerView& b) {
  if (a.block_size != b.block_size) return "the block_size of a layer";
  if (a.num_kv_heads != b.num_kv_heads) return "the num_kv_heads of a layer";
  if (const char* found = difference(runs_of_a, b.runs)) return found;
  return difference(more_of_a, more_runs(b));
}

void keep_runs(std::span<const HeadRun> runs, std::vector<HeadRun>& kept) {
  kept.assign(runs.begin(), runs.end());
}

}  // namespace

bool has_rows_on_16(const AttendArgs& args) {
  return fits_chunks(args.q) && fits_chunks(args.out);
}

void PlannedShape::keep(const AttendArgs& given) {
  args = given;
  keep_runs(given.packed.runs, packed_runs);
  keep_runs(more_runs(given.packed), packed_more);
  const LayerView full_precision = given.num_sink_blocks ? given.full_precision : LayerView();
  keep_runs(full_precision.runs, full_precision_runs);
  keep_runs(more_runs(full_precision), full_precision_more);
  for (LayerView* view : {&args.packed, &args.full_precision}) {
    view->runs = {};
    view->next_segment = nullptr;
  }
  rows_are_on_16 = has_rows_on_16(given);
}

const char* PlannedShape::difference_from(const AttendArgs& call) const {
  if (call.num_sequences != args.num_sequences) return "num_sequences";
  if (call.num_q_heads != args.num_q_heads) return "num_q_heads";
  if (call.max_blocks_per_sequence != args.max_blocks_per_sequence)
    return "the block table's blocks of a sequence";
  if (call.window != args.window) return "window";
  if (call.window_sinks != args.window_sinks) return "window_sinks";
  if (call.q.dtype != args.q.dtype) return "the type of q";
  if (!call.tree_mask != !args.tree_mask) return "whether there is a tree_mask";
  if (!call.num_sink_blocks != !args.num_sink_blocks)
    return "whether there is a full-precision window";
  if (!call.transform.k.block_offset != !args.transform.k.block_offset)
    return "whether K has a block_offset";
  if (const char* found = difference(args.packed, packed_runs, packed_more, call.packed)) {
    return found;
  }
  if (!call.num_sink_blocks) return nullptr;
  return difference(args.full_precision, full_precision_runs, full_precision_more,
                    call.full_precision);
}

}  // namespace kvx::ops::cuda
