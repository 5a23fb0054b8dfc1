// kvx_copy_blocks and kvx_transcode: stored rows to other places, formats and orders.
#include "ops/copy_blocks/copy_blocks_cuda.hpp"

#include "abi/call.hpp"
#include "abi/device_verb.hpp"
#include "abi/executor.hpp"
#include "abi/kernels.hpp"
#include "abi/layer_view.hpp"
#include "abi/slots.hpp"
#include "ops/append/append.hpp"
#include "ops/gather/gather.hpp"

namespace kvx::abi {
namespace {

// A V that is a part of K's rows cannot take in one that is not.
Status check_values(const LayerOfCaller& from, const LayerOfCaller& to) {
  if (!to.runs.front().v.is_alias || !from.has_own_v()) return {};
  return unsupported("to keeps V as a prefix of K, from beside it; expected rows of one kind");
}

Status copy_on_device(const kvx_copy_args_t& known, const LayerOfCaller& from,
                      const LayerOfCaller& to, void* stream) {
  if (from.is_on_device() != to.is_on_device()) {
    return unsupported("from and to lie one on the host and one on a GPU; expected both in one");
  }
  if (known.nonfinite_inputs != nullptr) {
    return unsupported("args.nonfinite_inputs is set; a layer on a GPU counts in its findings");
  }
  VerbAddresses addresses(to);
  addresses.add(from, "from")
      .add("args.from_blocks", known.from_blocks)
      .add("args.to_blocks", known.to_blocks)
      .add("args.num_tokens", known.num_tokens);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(to, addresses, stream));
  return ops::copy_blocks(verb.context, from.view, to.view,
                          {.count = known.num_copies,
                           .from_blocks = known.from_blocks,
                           .to_blocks = known.to_blocks,
                           .num_tokens = known.num_tokens},
                          verb.findings);
}

Status copy_blocks(const kvx_copy_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_copy_args_t known, read_struct(caller, "args"));
  thread_local LayerOfCaller from;
  thread_local LayerOfCaller to;
  KVX_RETURN_IF_ERROR(read_layer(known.from, "from", from, LayerPlace::kAnywhere));
  KVX_RETURN_IF_ERROR(read_layer(known.to, "to", to, LayerPlace::kAnywhere));
  KVX_RETURN_IF_ERROR(check_values(from, to));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(known.executor));
  if (known.num_copies == 0) return {};
  if (known.from_blocks == nullptr || known.to_blocks == nullptr) {
    return invalid_argument("args.{} is null",
                            known.from_blocks == nullptr ? "from_blocks" : "to_blocks");
  }
  if (from.is_on_device() || to.is_on_device()) return copy_on_device(known, from, to, stream);
  thread_local std::vector<ops::BlockCopy> copies;
  copies.clear();
  for (uint32_t i = 0; i < known.num_copies; ++i) {
    const int num_tokens = known.num_tokens ? known.num_tokens[i] : from.view.block_size;
    copies.push_back({known.from_blocks[i], known.to_blocks[i], num_tokens});
  }
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  KVX_ASSIGN_OR_RETURN(
      const int64_t nonfinite,
      ops::copy_blocks({kernels, &chosen_executor(threads)}, from.view, to.view, copies));
  if (known.nonfinite_inputs) *known.nonfinite_inputs += static_cast<uint64_t>(nonfinite);
  return {};
}

// --- transcode: gather some tokens, append them, and so on ---

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
  if (work.from.transform.k.block_offset || work.to.transform.k.block_offset) {
    return unsupported("a layer has a block_offset; slots do not tell the tokens' positions");
  }
  return {};
}

// Tokens with a negative slot on either side are left out, so that both lists are of those copied.
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

// gather speaks of sequences: run i of consecutive slots in a block is block i of one sequence.
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

// Returns the non-finite inputs that the target's codes could not say.
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

Status transcode(const kvx_transcode_args_t* caller) {
  KVX_ASSIGN_OR_RETURN(const kvx_transcode_args_t known, read_struct(caller, "args"));
  thread_local Transcode work;
  KVX_RETURN_IF_ERROR(read_layer(known.from, "from", work.from));
  KVX_RETURN_IF_ERROR(read_layer(known.to, "to", work.to));
  KVX_RETURN_IF_ERROR(check_layers(work));
  KVX_RETURN_IF_ERROR(check_values(work.from, work.to));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(known.executor));
  KVX_RETURN_IF_ERROR(read_slots(known.slot_dtype, known.from_slots, known.num_tokens, "from_slots",
                                 work.from_slots));
  KVX_RETURN_IF_ERROR(
      read_slots(known.slot_dtype, known.to_slots, known.num_tokens, "to_slots", work.to_slots));
  KVX_RETURN_IF_ERROR(select_tokens(work));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());

  // Whole blocks of the target at once, so that a scale that a block shares sees the whole block.
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
  if (known.nonfinite_inputs) *known.nonfinite_inputs += nonfinite;
  return {};
}

}  // namespace
}  // namespace kvx::abi

extern "C" kvx_status_t kvx_copy_blocks(const kvx_copy_args_t* args, void* stream) {
  return kvx::abi::run_call([&] { return kvx::abi::copy_blocks(args, stream); });
}

extern "C" kvx_status_t kvx_transcode(const kvx_transcode_args_t* args, void* /*stream*/) {
  return kvx::abi::run_call([&] { return kvx::abi::transcode(args); });
}
