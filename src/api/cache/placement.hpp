// Where a cache that owns its memory lies, as its caller says it, and whether a call's arrays lie
// there too.
#pragma once

#include <climits>
#include <optional>

#include "api/verbs/device_verb.hpp"
#include "device/cuda_caller.hpp"
#include "kv/verbs/cuda_place.hpp"

namespace kvx::boundary {

// args: a struct with memory, device, max_step_tokens and stream; name: the argument that it is.
// Nothing where the cache lies in the host's memory.
template <class Args>
Result<std::optional<kv::CudaPlacement>> read_placement(const Args& args, std::string_view name,
                                                        uint32_t most_step_tokens) {
  if (args.memory == KVX_MEMORY_UNKNOWN || args.memory == KVX_MEMORY_HOST) {
    if (args.device == 0 && args.max_step_tokens == 0 && args.stream == nullptr) {
      return std::optional<kv::CudaPlacement>();
    }
    return invalid_argument(
        "{}.memory is {}; expected KVX_MEMORY_DEVICE with a device, max_step_tokens or stream",
        name, args.memory);
  }
  if (args.memory != KVX_MEMORY_DEVICE) {
    return invalid_argument("{}.memory is {}; expected 0, KVX_MEMORY_HOST or _DEVICE", name,
                            args.memory);
  }
  if (args.max_step_tokens > most_step_tokens) {
    return invalid_argument("{}.max_step_tokens is {}; expected 0 to {}", name,
                            args.max_step_tokens, most_step_tokens);
  }
  if (args.device > INT_MAX) {
    return invalid_argument("{}.device is {}; expected the index of a GPU", name, args.device);
  }
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* device,
                       device::known_cuda_device(static_cast<int>(args.device)));
  kv::CudaPlacement place;
  place.context = {*device, args.stream};
  if (args.max_step_tokens != 0) place.max_step_tokens = static_cast<int>(args.max_step_tokens);
  return std::optional(std::move(place));
}

// On a GPU the caller's arrays must lie where the cache does. rows: what the caller calls them.
inline Status check_on_device(const std::optional<kv::CudaPlacement>& place,
                              const VerbAddresses& addresses, std::string_view rows) {
  if (!place) return {};
  KVX_RETURN_IF_ERROR(addresses.deferred_errors().status());
  KVX_ASSIGN_OR_RETURN(auto current, device::CurrentCudaDevice::set(place->context.device.index));
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* device, find_device(addresses.all()));
  if (device->index == place->context.device.index) return {};
  return unsupported("{} lie on CUDA device {}; the cache lies on {}", rows, device->index,
                     place->context.device.index);
}

}  // namespace kvx::boundary
