// kvx_append: stores rows of floats in the slots of a layer in the caller's memory.
#include "api/verbs/append.hpp"

#include "api/call.hpp"
#include "api/checks/layer_view.hpp"
#include "api/checks/rows_view.hpp"
#include "api/checks/slots.hpp"
#include "api/executor.hpp"
#include "api/kernels.hpp"
#include "api/verbs/prepared_layer.hpp"
#include "core/scratch.hpp"
#include "ops/append/append_cuda.hpp"

namespace kvx::boundary {
namespace {

// Replaces slots beyond the layer by -1, which append skips. Returns how many there were.
int64_t skip_beyond(int64_t num_slots, std::vector<int64_t>& slots) {
  int64_t skipped = 0;
  for (int64_t& slot : slots) {
    if (slot < num_slots) continue;
    slot = -1;
    ++skipped;
  }
  return skipped;
}

Result<std::optional<DType>> read_window_dtype(uint32_t dtype) {
  switch (dtype) {
    case 0:
      return std::optional<DType>();
    case KVX_DTYPE_F16:
      return std::optional(DType::kF16);
    case KVX_DTYPE_BF16:
      return std::optional(DType::kBF16);
    case KVX_DTYPE_F32:
      return std::optional(DType::kF32);
    default:
      return invalid_argument("args.window_dtype is {}; expected F16 {}, BF16 {}, F32 {} or 0",
                              dtype, static_cast<int>(KVX_DTYPE_F16),
                              static_cast<int>(KVX_DTYPE_BF16), static_cast<int>(KVX_DTYPE_F32));
  }
}

// Reads everything but the slots.
Result<ops::AppendArgs> read_args(const kvx_append_args_t& args, const LayerOfCaller& layer) {
  ops::AppendArgs checked;
  checked.cache = layer.view;
  checked.transform = layer.transform;
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows k,
                       read_rows(args.k, layer.view.num_kv_heads, layer.k_head_dim(), "k"));
  KVX_RETURN_IF_ERROR(
      check_apart(layer, k, args.num_tokens, layer.view.num_kv_heads, layer.k_head_dim(), "k"));
  checked.k = as_input(k);
  if (layer.has_own_v()) {
    KVX_ASSIGN_OR_RETURN(const MutableFloatRows v,
                         read_rows(args.v, layer.view.num_kv_heads, layer.v_head_dim(), "v"));
    KVX_RETURN_IF_ERROR(
        check_apart(layer, v, args.num_tokens, layer.view.num_kv_heads, layer.v_head_dim(), "v"));
    checked.v = as_input(v);
  }
  if (!layer.has_own_v() && args.v != nullptr) {
    return invalid_argument("args.v is set; the layer stores no V beside K");
  }
  if (args.reserved != 0) return invalid_argument("args.reserved is {}; expected 0", args.reserved);
  KVX_ASSIGN_OR_RETURN(checked.window_dtype, read_window_dtype(args.window_dtype));
  if (args.positions != nullptr) {
    checked.positions = {args.positions, static_cast<size_t>(args.num_tokens)};
  }
  return checked;
}

// Reads a call on a GPU. The slots stay in its memory, where the kernels read them as 64-bit
// numbers. Without tokens nothing is read.
Result<ops::AppendArgs> read_on_device(const kvx_append_args_t& args, const LayerOfCaller& layer) {
  if (args.num_tokens < 0 || (args.slots == nullptr && args.num_tokens != 0)) {
    return invalid_argument("args.num_tokens is {} with slots {}; expected 0 or more, and slots",
                            args.num_tokens, args.slots);
  }
  if (args.slot_dtype != KVX_DTYPE_S64) {
    return unsupported("args.slot_dtype is {}; slots on a GPU are S64 7", args.slot_dtype);
  }
  if (args.out_of_range_slots != nullptr || args.nonfinite_inputs != nullptr) {
    return unsupported("args has a counter of its own; a layer on a GPU counts in layer.counters");
  }
  if (args.num_tokens == 0) return ops::AppendArgs{};
  KVX_ASSIGN_OR_RETURN(ops::AppendArgs checked, read_args(args, layer));
  checked.slot_mapping = {static_cast<const int64_t*>(args.slots),
                          static_cast<size_t>(args.num_tokens)};
  return checked;
}

void add_arrays(VerbAddresses& addresses, const kvx_append_args_t& args,
                const ops::AppendArgs& checked) {
  addresses.add_rows("k.data", checked.k)
      .add_rows("v.data", checked.v)
      .add("args.slots", checked.slot_mapping.data())
      .add("args.positions", args.positions);
}

Status append_on_device(const kvx_append_args_t& args, LayerOfCaller& layer, void* stream,
                        RowProcessing* processing) {
  KVX_ASSIGN_OR_RETURN(const ops::AppendArgs checked, read_on_device(args, layer));
  if (args.num_tokens == 0) return {};
  VerbAddresses addresses(layer);
  add_arrays(addresses, args, checked);
  if (processing != nullptr) {
    KVX_RETURN_IF_ERROR(processing->read(checked, layer));
    processing->add_arrays(addresses);
  }
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(layer, addresses, stream));
  KVX_ASSIGN_OR_RETURN(const auto scales, widen_scales(verb.context, layer));
  if (processing != nullptr) KVX_RETURN_IF_ERROR(processing->launch(verb));
  return ops::append(verb.context, checked, verb.counters);
}

Status append_prepared(kvx_prepared_layer_t handle, const kvx_append_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const PreparedLayer* prepared, find_prepared_layer(handle));
  KVX_ASSIGN_OR_RETURN(const kvx_append_args_t args, read_struct(caller, "args"));
  if (args.layer != nullptr) {
    return invalid_argument("args.layer is set; expected null, since the handle has the layer");
  }
  KVX_ASSIGN_OR_RETURN(const ops::AppendArgs checked,
                       read_on_device(args, prepared->layers.packed));
  if (args.num_tokens == 0) return {};
  Scratch<VerbAddresses> addresses;
  addresses->clear();
  add_arrays(*addresses, args, checked);
  KVX_RETURN_IF_ERROR(addresses->deferred_errors().status());  // not aligned
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, prepared->begin(stream));
  return ops::append(verb.context, checked, verb.counters);
}

}  // namespace

Status append(const kvx_append_args_t* caller, void* stream, RowProcessing* processing) {
  KVX_ASSIGN_OR_RETURN(const kvx_append_args_t args, read_struct(caller, "args"));
  Scratch<LayerOfCaller> kept_layer;
  LayerOfCaller& layer = *kept_layer;
  KVX_RETURN_IF_ERROR(read_layer(args.layer, "layer", layer, LayerMemory::kHostOrDevice));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(args.executor));
  if (layer.is_on_device()) return append_on_device(args, layer, stream, processing);
  Scratch<std::vector<int64_t>> kept_slots;
  std::vector<int64_t>& slots = *kept_slots;
  KVX_RETURN_IF_ERROR(read_slots(args.slot_dtype, args.slots, args.num_tokens, "slots", slots));
  if (args.num_tokens == 0) return {};
  KVX_ASSIGN_OR_RETURN(ops::AppendArgs checked, read_args(args, layer));
  const int64_t skipped = args.out_of_range_slots == nullptr
                              ? 0
                              : skip_beyond(layer.view.num_blocks * layer.view.block_size, slots);
  checked.slot_mapping = slots;
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  if (processing != nullptr) {
    KVX_RETURN_IF_ERROR(processing->read(checked, layer));
    KVX_RETURN_IF_ERROR(ops::check_append(checked));
    KVX_RETURN_IF_ERROR(processing->run());
  }
  KVX_ASSIGN_OR_RETURN(const ops::AppendReport report,
                       ops::append({kernels, &chosen_executor(threads)}, checked));
  if (args.out_of_range_slots) *args.out_of_range_slots += static_cast<uint64_t>(skipped);
  if (args.nonfinite_inputs) {
    *args.nonfinite_inputs += static_cast<uint64_t>(report.nonfinite_inputs);
  }
  return {};
}

}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_append(const kvx_append_args_t* args, void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::append(args, stream); });
}

extern "C" kvx_status_t kvx_prepared_append(kvx_prepared_layer_t prepared,
                                            const kvx_append_args_t* args, void* stream) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::append_prepared(prepared, args, stream); });
}
