// kvx_append: rows to slots of a layer in the caller's memory.
#include "ops/append/append_cuda.hpp"

#include "abi/call.hpp"
#include "abi/device_verb.hpp"
#include "abi/executor.hpp"
#include "abi/kernels.hpp"
#include "abi/layer_view.hpp"
#include "abi/rows_view.hpp"
#include "abi/slots.hpp"
#include "core/reused.hpp"

namespace kvx::abi {
namespace {

// Leaves out the slots beyond the layer and counts them.
int64_t skip_beyond(int64_t num_slots, std::vector<int64_t>& slots) {
  int64_t skipped = 0;
  for (int64_t& slot : slots) {
    if (slot < num_slots) continue;
    slot = -1;
    ++skipped;
  }
  return skipped;
}

// All but the slots.
Result<ops::AppendArgs> read_args(const kvx_append_args_t& known, const LayerOfCaller& layer) {
  ops::AppendArgs args;
  args.cache = layer.view;
  args.transform = layer.transform;
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows k,
                       read_rows(known.k, layer.view.num_kv_heads, layer.k_head_dim(), "k"));
  KVX_RETURN_IF_ERROR(
      check_apart(layer, k, known.num_tokens, layer.view.num_kv_heads, layer.k_head_dim(), "k"));
  args.k = as_input(k);
  if (layer.has_own_v()) {
    KVX_ASSIGN_OR_RETURN(const MutableFloatRows v,
                         read_rows(known.v, layer.view.num_kv_heads, layer.v_head_dim(), "v"));
    KVX_RETURN_IF_ERROR(
        check_apart(layer, v, known.num_tokens, layer.view.num_kv_heads, layer.v_head_dim(), "v"));
    args.v = as_input(v);
  }
  if (!layer.has_own_v() && known.v != nullptr) {
    return invalid_argument("args.v is set; the layer stores no V beside K");
  }
  if (known.positions != nullptr) {
    args.positions = {known.positions, static_cast<size_t>(known.num_tokens)};
  }
  return args;
}

// Slots stay where they are and as wide as the kernels read them.
Status append_on_device(const kvx_append_args_t& known, const LayerOfCaller& layer, void* stream) {
  if (known.num_tokens < 0 || (known.slots == nullptr && known.num_tokens != 0)) {
    return invalid_argument("args.num_tokens is {} with slots {}; expected 0 or more, and slots",
                            known.num_tokens, known.slots);
  }
  if (known.slot_dtype != KVX_DTYPE_S64) {
    return unsupported("args.slot_dtype is {}; slots on a GPU are S64 7", known.slot_dtype);
  }
  if (known.out_of_range_slots != nullptr || known.nonfinite_inputs != nullptr) {
    return unsupported("args has a counter of its own; a layer on a GPU counts in layer.findings");
  }
  if (known.num_tokens == 0) return {};
  KVX_ASSIGN_OR_RETURN(ops::AppendArgs args, read_args(known, layer));
  args.slot_mapping = {static_cast<const int64_t*>(known.slots),
                       static_cast<size_t>(known.num_tokens)};
  const VerbAddresses addresses = VerbAddresses(layer)
                                      .add_rows("k.data", args.k)
                                      .add_rows("v.data", args.v)
                                      .add("args.slots", args.slot_mapping.data())
                                      .add("args.positions", known.positions);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(layer, addresses, stream));
  return ops::append(verb.context, args, verb.findings);
}

Status append(const kvx_append_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_append_args_t known, read_struct(caller, "args"));
  Reused<LayerOfCaller> kept_layer;
  LayerOfCaller& layer = *kept_layer;
  KVX_RETURN_IF_ERROR(read_layer(known.layer, "layer", layer, LayerPlace::kAnywhere));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(known.executor));
  if (layer.is_on_device()) return append_on_device(known, layer, stream);
  Reused<std::vector<int64_t>> kept_slots;
  std::vector<int64_t>& slots = *kept_slots;
  KVX_RETURN_IF_ERROR(read_slots(known.slot_dtype, known.slots, known.num_tokens, "slots", slots));
  if (known.num_tokens == 0) return {};
  KVX_ASSIGN_OR_RETURN(ops::AppendArgs args, read_args(known, layer));
  const int64_t skipped = known.out_of_range_slots == nullptr
                              ? 0
                              : skip_beyond(layer.view.num_blocks * layer.view.block_size, slots);
  args.slot_mapping = slots;
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  KVX_ASSIGN_OR_RETURN(const ops::AppendReport report,
                       ops::append({kernels, &chosen_executor(threads)}, args));
  if (known.out_of_range_slots) *known.out_of_range_slots += static_cast<uint64_t>(skipped);
  if (known.nonfinite_inputs) {
    *known.nonfinite_inputs += static_cast<uint64_t>(report.nonfinite_inputs);
  }
  return {};
}

}  // namespace
}  // namespace kvx::abi

extern "C" kvx_status_t kvx_append(const kvx_append_args_t* args, void* stream) {
  return kvx::abi::run_call([&] { return kvx::abi::append(args, stream); });
}
