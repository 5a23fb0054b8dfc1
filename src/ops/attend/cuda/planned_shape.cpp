// What must be equal in the calls of a plan.
#include "ops/attend/cuda/planned_shape.hpp"

#include "ops/cuda/fits_chunks.hpp"

namespace kvx::ops::cuda {
namespace {

// What a kernel's choice and its cut into work tiles depend on of an address.
intptr_t alignment_of(const void* address) {
  return reinterpret_cast<intptr_t>(address) % 16;
}

bool is_laid_out_alike(const CodeAddress& a, const CodeAddress& b) {
  return a.block_stride == b.block_stride && a.token_stride == b.token_stride &&
         a.head_stride == b.head_stride && a.fragment_stride == b.fragment_stride &&
         a.fragment_bytes == b.fragment_bytes;
}
bool is_laid_out_alike(const ScaleAddress& a, const ScaleAddress& b) {
  return a.block_stride == b.block_stride && a.token_stride == b.token_stride &&
         a.head_stride == b.head_stride && a.group_stride == b.group_stride;
}

Status check_side(const SideView& planned, const SideView& side, std::string_view view, size_t run,
                  char name) {
  const auto differs = [&](const char* what) {
    return invalid_argument(
        "{}.runs[{}].{} differs in its {} from the layer that the plan was made with; expected "
        "layers that are stored alike, or a plan for each kind",
        view, run, name, what);
  };
  if (!(planned.spec == side.spec)) return differs("format");
  if (planned.head_dim != side.head_dim) return differs("head_dim");
  if (planned.is_interleaved != side.is_interleaved || planned.is_alias != side.is_alias)
    return differs("order");
  if (!is_laid_out_alike(planned.codes, side.codes) ||
      !is_laid_out_alike(planned.scales, side.scales))
    return differs("strides");
  if (alignment_of(planned.codes.base) != alignment_of(side.codes.base) ||
      alignment_of(planned.scales.base) != alignment_of(side.scales.base))
    return differs("addresses' remainders by 16");
  return {};
}

Status check_view(const LayerView& planned, const std::vector<HeadRun>& planned_runs,
                  const LayerView& view, std::string_view name) {
  if (planned.block_size != view.block_size || planned.num_kv_heads != view.num_kv_heads ||
      planned_runs.size() != view.runs.size()) {
    return invalid_argument(
        "{} has block_size {}, {} KV heads in {} runs; expected the plan's {}, {} in {}", name,
        view.block_size, view.num_kv_heads, view.runs.size(), planned.block_size,
        planned.num_kv_heads, planned_runs.size());
  }
  for (size_t i = 0; i < planned_runs.size(); ++i) {
    const HeadRun& a = planned_runs[i];
    const HeadRun& b = view.runs[i];
    if (a.first_head != b.first_head || a.num_heads != b.num_heads) {
      return invalid_argument("{}.runs[{}] has {} heads from {} on; expected the plan's {} from {}",
                              name, i, b.num_heads, b.first_head, a.num_heads, a.first_head);
    }
    KVX_RETURN_IF_ERROR(check_side(a.k, b.k, name, i, 'k'));
    KVX_RETURN_IF_ERROR(check_side(a.v, b.v, name, i, 'v'));
  }
  return {};
}

// Options of which kernels are chosen by whether they are there.
Status check_presence(bool planned, bool is_there, std::string_view name) {
  if (planned == is_there) return {};
  return invalid_argument("{} is {}; the plan was made {} it, expected the same", name,
                          is_there ? "set" : "null", planned ? "with" : "without");
}

}  // namespace

void PlannedShape::keep(const AttendArgs& given) {
  args = given;
  packed_runs.assign(given.packed.runs.begin(), given.packed.runs.end());
  full_precision_runs.clear();
  if (given.num_sink_blocks) {
    full_precision_runs.assign(given.full_precision.runs.begin(), given.full_precision.runs.end());
  }
  args.packed.runs = {};
  args.full_precision.runs = {};
}

Status PlannedShape::check(const AttendArgs& call, bool has_prefill) const {
  if (call.num_sequences != args.num_sequences || call.num_q_heads != args.num_q_heads ||
      call.max_blocks_per_sequence != args.max_blocks_per_sequence) {
    return invalid_argument(
        "the call has {} sequences of up to {} blocks and {} query heads; expected the plan's {}, "
        "{} and {}",
        call.num_sequences, call.max_blocks_per_sequence, call.num_q_heads, args.num_sequences,
        args.max_blocks_per_sequence, args.num_q_heads);
  }
  if (call.window != args.window || call.window_sinks != args.window_sinks) {
    return invalid_argument("window is {} and window_sinks {}; expected the plan's {} and {}",
                            call.window, call.window_sinks, args.window, args.window_sinks);
  }
  if (call.q.dtype != args.q.dtype) {
    return invalid_argument("q has another type than the q that the plan was made with");
  }
  KVX_RETURN_IF_ERROR(
      check_presence(args.tree_mask != nullptr, call.tree_mask != nullptr, "tree_mask"));
  KVX_RETURN_IF_ERROR(check_presence(args.num_sink_blocks != nullptr,
                                     call.num_sink_blocks != nullptr, "num_sink_blocks"));
  KVX_RETURN_IF_ERROR(check_presence(args.transform.k.block_offset != nullptr,
                                     call.transform.k.block_offset != nullptr, "K's block_offset"));
  if (has_prefill && (!fits_chunks(call.q) || !fits_chunks(call.out))) {
    return invalid_argument(
        "q or out has rows off 16 bytes, where the plan's prefill kernel does not accept them; "
        "expected rows on 16 bytes, or a plan that was made with these rows");
  }
  KVX_RETURN_IF_ERROR(check_view(args.packed, packed_runs, call.packed, "packed"));
  if (!call.num_sink_blocks) return {};
  return check_view(args.full_precision, full_precision_runs, call.full_precision,
                    "full_precision");
}

}  // namespace kvx::ops::cuda
