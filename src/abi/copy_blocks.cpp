// kvx_copy_blocks: blocks of stored rows to other places, formats and orders.
#include "ops/copy_blocks/copy_blocks_cuda.hpp"

#include "abi/call.hpp"
#include "abi/device_verb.hpp"
#include "abi/executor.hpp"
#include "abi/kernels.hpp"
#include "abi/layer_view.hpp"
#include "core/reused.hpp"

namespace kvx::abi {
namespace {

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
  Reused<LayerOfCaller> kept_from;
  Reused<LayerOfCaller> kept_to;
  LayerOfCaller& from = *kept_from;
  LayerOfCaller& to = *kept_to;
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
  Reused<std::vector<ops::BlockCopy>> kept_copies;
  std::vector<ops::BlockCopy>& copies = *kept_copies;
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

}  // namespace
}  // namespace kvx::abi

extern "C" kvx_status_t kvx_copy_blocks(const kvx_copy_args_t* args, void* stream) {
  return kvx::abi::run_call([&] { return kvx::abi::copy_blocks(args, stream); });
}
