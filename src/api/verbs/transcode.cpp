// kvx_transcode: copies tokens between slots of two layers that may store them differently. On the
// host it gathers a batch of tokens, appends it, and repeats.
#include "api/call.hpp"
#include "api/checks/layer_view.hpp"
#include "api/checks/rows_view.hpp"
#include "api/checks/slots.hpp"
#include "api/executor.hpp"
#include "api/kernels.hpp"
#include "api/verbs/device_verb.hpp"
#include "core/scratch.hpp"
#include "ops/append/append.hpp"
#include "ops/gather/gather.hpp"
#include "ops/side_rows.hpp"
#include "ops/transcode/transcode_cuda.hpp"

namespace kvx::boundary {
namespace {

struct Transcode {
  LayerOfCaller from;
  LayerOfCaller to;
  std::vector<int64_t> from_slots;
  std::vector<int64_t> to_slots;
  std::vector<ops::GatherRange> ranges;
  std::vector<int32_t> blocks;
  std::vector<float> k_rows;
  std::vector<float> v_rows;
};

Status check_layers(const Transcode& work) {
  const ops::LayerView& from = work.from.view;
  const ops::LayerView& to = work.to.view;
  if (from.num_kv_heads != to.num_kv_heads || work.from.k_head_dim() != work.to.k_head_dim() ||
      work.from.v_head_dim() != work.to.v_head_dim()) {
    return invalid_argument(
        "from has {} KV heads of {} and {}, to {} of {} and {}; expected the "
        "same",
        from.num_kv_heads, work.from.k_head_dim(), work.from.v_head_dim(), to.num_kv_heads,
        work.to.k_head_dim(), work.to.v_head_dim());
  }
  if (const format::FormatSpec* dual = ops::dual_format_of(to)) {
    return unsupported(
        "to is stored in {}, which quantises whole blocks; expected kvx_copy_blocks, or a format "
        "of rows",
        dual->facts->name);
  }
  if (work.from.transform.k.block_offset || work.to.transform.k.block_offset) {
    return unsupported("a layer has a block_offset; transcode has no positions of the tokens");
  }
  return {};
}

// Removes tokens with a negative slot on either side, so that both lists name the copied tokens.
Status select_tokens(Transcode& work) {
  const int64_t num_slots = work.from.view.num_blocks * work.from.view.block_size;
  const int64_t num_target_slots = work.to.view.num_blocks * work.to.view.block_size;
  size_t kept = 0;
  for (size_t t = 0; t < work.from_slots.size(); ++t) {
    const int64_t from = work.from_slots[t];
    const int64_t to = work.to_slots[t];
    if (from < 0 || to < 0) continue;
    if (from >= num_slots || to >= num_target_slots) {
      return out_of_range(
          "from_slots[{0}] is {1} and to_slots[{0}] {2}; the layers have {3} and "
          "{4} slots",
          t, from, to, num_slots, num_target_slots);
    }
    work.from_slots[kept] = from;
    work.to_slots[kept] = to;
    ++kept;
  }
  work.from_slots.resize(kept);
  work.to_slots.resize(kept);
  return {};
}

// Gather reads sequences, so run i of consecutive slots in a block becomes block i of one sequence.
void describe_tokens(Transcode& work, std::span<const int64_t> slots) {
  const int block_size = work.from.view.block_size;
  work.ranges.clear();
  work.blocks.clear();
  for (size_t t = 0; t < slots.size();) {
    const int64_t offset = slots[t] % block_size;
    size_t n = 1;
    while (t + n < slots.size() && slots[t + n] == slots[t] + static_cast<int64_t>(n) &&
           offset + static_cast<int64_t>(n) < block_size) {
      ++n;
    }
    const int64_t first = std::ssize(work.blocks) * block_size + offset;
    work.ranges.push_back({0, first, static_cast<int64_t>(n), static_cast<int64_t>(t)});
    work.blocks.push_back(static_cast<int32_t>(slots[t] / block_size));
    t += n;
  }
}

// Returns how many non-finite inputs the target's format cannot represent.
Result<int64_t> transcode_tokens(const ops::CpuContext& context, Transcode& work, size_t first,
                                 size_t count) {
  const std::span<const int64_t> from_slots(work.from_slots.data() + first, count);
  const std::span<const int64_t> to_slots(work.to_slots.data() + first, count);
  describe_tokens(work, from_slots);
  const int num_heads = work.from.view.num_kv_heads;
  const int k_dim = work.from.k_head_dim();
  const int v_dim = work.from.v_head_dim();
  ops::GatherArgs gather;
  gather.cache = work.from.view;
  gather.transform = work.from.transform;
  gather.block_table = {work.blocks.data(), std::ssize(work.blocks)};
  gather.max_blocks_per_sequence = std::ssize(work.blocks);
  gather.num_sequences = 1;
  gather.ranges = work.ranges;
  gather.k = dense_rows(static_cast<void*>(work.k_rows.data()), DType::kF32, num_heads, k_dim);
  if (work.to.has_own_v()) {
    gather.v = dense_rows(static_cast<void*>(work.v_rows.data()), DType::kF32, num_heads, v_dim);
  }
  KVX_RETURN_IF_ERROR(ops::gather(context, gather));
  ops::AppendArgs append;
  append.cache = work.to.view;
  append.transform = work.to.transform;
  append.k = as_input(gather.k);
  append.v = as_input(gather.v);
  append.slot_mapping = to_slots;
  KVX_ASSIGN_OR_RETURN(const ops::AppendReport report, ops::append(context, append));
  return report.nonfinite_inputs;
}

// Slots stay where they are and as full-precision as the kernels read them.
Status transcode_on_device(const kvx_transcode_args_t& args, Transcode& work, void* stream) {
  if (work.from.is_on_device() != work.to.is_on_device()) {
    return unsupported("from and to lie one on the host and one on a GPU; expected both in one");
  }
  const bool has_slots = args.from_slots != nullptr && args.to_slots != nullptr;
  if (args.num_tokens < 0 || (!has_slots && args.num_tokens != 0)) {
    return invalid_argument(
        "args.num_tokens is {} with slots {} and {}; expected 0 or more, and slots",
        args.num_tokens, args.from_slots, args.to_slots);
  }
  if (args.slot_dtype != KVX_DTYPE_S64) {
    return unsupported("args.slot_dtype is {}; slots on a GPU are S64 7", args.slot_dtype);
  }
  if (args.nonfinite_inputs != nullptr) {
    return unsupported("args.nonfinite_inputs is set; a layer on a GPU counts in its counters");
  }
  if (args.num_tokens == 0) return {};
  const ops::TranscodeArgs checked = {.from = work.from.view,
                                      .to = work.to.view,
                                      .from_transform = work.from.transform,
                                      .to_transform = work.to.transform,
                                      .from_slots = static_cast<const int64_t*>(args.from_slots),
                                      .to_slots = static_cast<const int64_t*>(args.to_slots),
                                      .num_tokens = args.num_tokens};
  VerbAddresses addresses(work.to);
  addresses.add(work.from, "from")
      .add("args.from_slots", checked.from_slots)
      .add("args.to_slots", checked.to_slots);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(work.to, addresses, stream));
  KVX_ASSIGN_OR_RETURN(const auto from_scales, widen_scales(verb.context, work.from));
  KVX_ASSIGN_OR_RETURN(const auto to_scales, widen_scales(verb.context, work.to));
  return ops::transcode(verb.context, checked, verb.counters);
}

Status transcode(const kvx_transcode_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_transcode_args_t args, read_struct(caller, "args"));
  Scratch<Transcode> kept;
  Transcode& work = *kept;
  KVX_RETURN_IF_ERROR(read_layer(args.from, "from", work.from, LayerMemory::kHostOrDevice));
  KVX_RETURN_IF_ERROR(read_layer(args.to, "to", work.to, LayerMemory::kHostOrDevice));
  KVX_RETURN_IF_ERROR(check_layers(work));
  KVX_RETURN_IF_ERROR(check_values(work.from, work.to));
  KVX_RETURN_IF_ERROR(check_apart(work.from, work.to));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(args.executor));
  if (work.from.is_on_device() || work.to.is_on_device()) {
    return transcode_on_device(args, work, stream);
  }
  KVX_RETURN_IF_ERROR(
      read_slots(args.slot_dtype, args.from_slots, args.num_tokens, "from_slots", work.from_slots));
  KVX_RETURN_IF_ERROR(
      read_slots(args.slot_dtype, args.to_slots, args.num_tokens, "to_slots", work.to_slots));
  KVX_RETURN_IF_ERROR(select_tokens(work));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());

  // A batch is whole blocks of the target, so that a page-shared scale is made of the whole block.
  const size_t at_once = static_cast<size_t>(work.to.view.block_size) *
                         std::max<size_t>(1, 1024 / static_cast<size_t>(work.to.view.block_size));
  const size_t most = std::min(at_once, work.to_slots.size());
  const size_t heads = static_cast<size_t>(work.to.view.num_kv_heads);
  work.k_rows.resize(most * heads * static_cast<size_t>(work.to.k_head_dim()));
  work.v_rows.resize(most * heads * static_cast<size_t>(work.to.v_head_dim()));
  uint64_t nonfinite = 0;
  for (size_t first = 0; first < work.to_slots.size(); first += at_once) {
    KVX_ASSIGN_OR_RETURN(const int64_t found,
                         transcode_tokens({kernels, &chosen_executor(threads)}, work, first,
                                          std::min(at_once, work.to_slots.size() - first)));
    nonfinite += static_cast<uint64_t>(found);
  }
  if (args.nonfinite_inputs) *args.nonfinite_inputs += nonfinite;
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_transcode(const kvx_transcode_args_t* args, void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::transcode(args, stream); });
}
