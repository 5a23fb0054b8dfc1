// kvx_copy_blocks: copies blocks of stored rows to other blocks, formats and orders.
#include "ops/copy_blocks/copy_blocks_cuda.hpp"

#include "api/call.hpp"
#include "api/checks/layer_view.hpp"
#include "api/executor.hpp"
#include "api/kernels.hpp"
#include "api/verbs/device_verb.hpp"
#include "core/scratch.hpp"

namespace kvx::boundary {
namespace {

Status copy_on_device(const kvx_copy_args_t& args, LayerOfCaller& from, LayerOfCaller& to,
                      void* stream) {
  if (from.is_on_device() != to.is_on_device()) {
    return unsupported("from and to lie one on the host and one on a GPU; expected both in one");
  }
  if (args.nonfinite_inputs != nullptr) {
    return unsupported("args.nonfinite_inputs is set; a layer on a GPU counts in its counters");
  }
  VerbAddresses addresses(to);
  addresses.add(from, "from")
      .add("args.from_blocks", args.from_blocks)
      .add("args.to_blocks", args.to_blocks)
      .add("args.num_tokens", args.num_tokens);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(to, addresses, stream));
  KVX_ASSIGN_OR_RETURN(const auto from_scales, widen_scales(verb.context, from));
  KVX_ASSIGN_OR_RETURN(const auto to_scales, widen_scales(verb.context, to));
  return ops::copy_blocks(verb.context, from.view, to.view,
                          {.count = args.num_copies,
                           .from_blocks = args.from_blocks,
                           .to_blocks = args.to_blocks,
                           .num_tokens = args.num_tokens},
                          verb.counters);
}

Status copy_blocks(const kvx_copy_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_copy_args_t args, read_struct(caller, "args"));
  Scratch<LayerOfCaller> kept_from;
  Scratch<LayerOfCaller> kept_to;
  LayerOfCaller& from = *kept_from;
  LayerOfCaller& to = *kept_to;
  KVX_RETURN_IF_ERROR(read_layer(args.from, "from", from, LayerMemory::kHostOrDevice));
  KVX_RETURN_IF_ERROR(read_layer(args.to, "to", to, LayerMemory::kHostOrDevice));
  KVX_RETURN_IF_ERROR(check_values(from, to));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(args.executor));
  if (args.num_copies == 0) return {};
  if (args.from_blocks == nullptr || args.to_blocks == nullptr) {
    return invalid_argument("args.{} is null",
                            args.from_blocks == nullptr ? "from_blocks" : "to_blocks");
  }
  if (from.is_on_device() || to.is_on_device()) return copy_on_device(args, from, to, stream);
  Scratch<std::vector<ops::BlockCopy>> kept_copies;
  std::vector<ops::BlockCopy>& copies = *kept_copies;
  copies.clear();
  for (uint32_t i = 0; i < args.num_copies; ++i) {
    const int num_tokens = args.num_tokens ? args.num_tokens[i] : from.view.block_size;
    copies.push_back({args.from_blocks[i], args.to_blocks[i], num_tokens});
  }
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  KVX_ASSIGN_OR_RETURN(
      const int64_t nonfinite,
      ops::copy_blocks({kernels, &chosen_executor(threads)}, from.view, to.view, copies));
  if (args.nonfinite_inputs) *args.nonfinite_inputs += static_cast<uint64_t>(nonfinite);
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_copy_blocks(const kvx_copy_args_t* args, void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::copy_blocks(args, stream); });
}
