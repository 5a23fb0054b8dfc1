// Where expanded rows lie in the workspace.
#include "ops/attend/cuda/prefill/expand/expand.hpp"

#include "core/checked.hpp"
#include "ops/attend/attend_cuda.hpp"

namespace kvx::ops::cuda {
namespace {

int64_t block_bytes(const AttendArgs& args, const HeadRun& run, int head_dim) {
  const int64_t row = expands_to_fp8(run) ? head_dim + int64_t{sizeof(float)} : head_dim * 2;
  return int64_t{run.num_heads} * args.packed.block_size * row;
}

// Whether the side's rows are of 16 bits, in words of that size.
bool has_words_of_16_bits(const SideView& side) {
  const CodeAddress& c = side.codes;
  const auto is_even = [](int64_t bytes) { return bytes % 2 == 0; };
  return side.spec.facts->element_bits == 16 && side.is_stored() && !side.is_interleaved &&
         is_even(reinterpret_cast<intptr_t>(c.base)) && is_even(c.block_stride) &&
         is_even(c.token_stride) && is_even(c.head_stride) && is_even(c.fragment_stride) &&
         is_even(c.fragment_bytes);
}

// The format that a side of a run gets.
format::FormatId expanded_format(const HeadRun& run, const SideView& side) {
  if (joins_fragments(run)) return side.spec.facts->id;
  return expands_to_fp8(run) ? format::FormatId::kFp8E4M3 : format::FormatId::kBF16;
}

SideView expanded_side(const AttendArgs& args, const HeadRun& run, const SideView& of_call,
                       uint8_t* base) {
  const bool is_fp8 = expands_to_fp8(run);
  const int head_dim = of_call.head_dim;
  format::SpecOptions computed;
  if (is_fp8) computed.scale_source = format::ScaleSource::kComputed;
  const format::FormatId id = expanded_format(run, of_call);
  SideView side;
  side.spec = format::make_spec(id, computed).value();
  side.head_dim = head_dim;
  const int64_t row_bytes = format::code_bytes_per_row(side.spec, head_dim);
  const int64_t block_size = args.packed.block_size;
  const int64_t block = block_bytes(args, run, head_dim);
  side.codes = {base, block, row_bytes, block_size * row_bytes};
  if (!is_fp8) return side;
  constexpr int64_t kScale = sizeof(float);
  side.scales = {base + run.num_heads * block_size * row_bytes, block, kScale, block_size * kScale,
                 kScale};
  return side;
}

}  // namespace

bool joins_fragments(const HeadRun& run) {
  return (run.k.codes.is_fragmented() || run.v.codes.is_fragmented()) &&
         has_words_of_16_bits(run.k) && has_words_of_16_bits(run.v);
}

ExpandedLayout expanded_layout(const AttendArgs& args, const HeadRun& run, int64_t max_tokens) {
  ExpandedLayout layout;
  layout.blocks_of_sequence = ceil_div<int64_t>(max_tokens, args.packed.block_size);
  layout.num_blocks = layout.blocks_of_sequence * args.num_sequences;
  layout.values_at = layout.num_blocks * block_bytes(args, run, run.k.head_dim);
  layout.ids_at = layout.values_at + layout.num_blocks * block_bytes(args, run, run.v.head_dim);
  layout.bytes = round_up<int64_t>(layout.ids_at + layout.num_blocks * 4, kCudaWorkspaceAlignment);
  return layout;
}

AttendArgs expanded_args(const AttendArgs& args, const HeadRun& of_call, int64_t max_tokens,
                         uint8_t* workspace, HeadRun& run) {
  const ExpandedLayout layout = expanded_layout(args, of_call, max_tokens);
  run = {of_call.first_head, of_call.num_heads, expanded_side(args, of_call, of_call.k, workspace),
         expanded_side(args, of_call, of_call.v, workspace + layout.values_at)};
  AttendArgs expanded = args;
  expanded.packed.num_blocks = layout.num_blocks;
  expanded.packed.runs = {&run, 1};
  if (!expands_to_fp8(of_call) && !joins_fragments(of_call)) {
    expanded.full_precision = {};
    expanded.num_sink_blocks = nullptr;
    expanded.first_recent_block = nullptr;
  }
  expanded.block_table = {reinterpret_cast<int32_t*>(workspace + layout.ids_at),
                          layout.blocks_of_sequence};
  expanded.max_blocks_per_sequence = layout.blocks_of_sequence;
  return expanded;
}

}  // namespace kvx::ops::cuda
