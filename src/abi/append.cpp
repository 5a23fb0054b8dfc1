// kvx_append: rows to slots of a layer in the caller's memory.
#include "ops/append/append.hpp"

#include "abi/call.hpp"
#include "abi/executor.hpp"
#include "abi/kernels.hpp"
#include "abi/layer_view.hpp"
#include "abi/slots.hpp"

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

Status append(const kvx_append_args_t* caller) {
  KVX_ASSIGN_OR_RETURN(const kvx_append_args_t known, read_struct(caller, "args"));
  thread_local LayerOfCaller layer;
  KVX_RETURN_IF_ERROR(read_layer(known.layer, "layer", layer));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(known.executor));
  thread_local std::vector<int64_t> slots;
  KVX_RETURN_IF_ERROR(read_slots(known.slot_dtype, known.slots, known.num_tokens, "slots", slots));
  if (known.num_tokens == 0) return {};

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
  const int64_t skipped = known.out_of_range_slots == nullptr
                              ? 0
                              : skip_beyond(layer.view.num_blocks * layer.view.block_size, slots);
  args.slot_mapping = slots;
  if (known.positions != nullptr) {
    args.positions = {known.positions, static_cast<size_t>(known.num_tokens)};
  }
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

extern "C" kvx_status_t kvx_append(const kvx_append_args_t* args, void* /*stream*/) {
  return kvx::abi::run_call([&] { return kvx::abi::append(args); });
}
