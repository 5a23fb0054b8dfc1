// Finds where the addresses of a call lie: on the host, or where one GPU reaches all of them.
#pragma once

#include <span>
#include <string_view>

#include "api/checks/deferred_errors.hpp"
#include "api/checks/v1_views.hpp"
#include "device/cuda_caller.hpp"

namespace kvx::boundary {

struct CallAddress {
  enum class Need : uint8_t {
    kAsDescribed,  // a tensor: the kind of memory in its descriptor
    kReadable,     // slots, tables, lengths, scales: any memory that the GPU reads
  };
  std::string_view name;
  const void* address = nullptr;
  MemoryType kind = MemoryType::kHost;
  Need need = Need::kAsDescribed;
};

inline CallAddress readable(std::string_view name, const void* address) {
  return {name, address, MemoryType::kDevice, CallAddress::Need::kReadable};
}

// Some tensors on the host and others on a GPU are added to deferred_errors. Requires: the first
// address is a tensor's.
void check_one_place(std::span<const CallAddress> addresses, DeferredErrors& deferred_errors);

// Returns the device that a call with a GPU's memory runs on. Null addresses are skipped.
// INVALID_ARGUMENT: an address is not in the kind of memory that its descriptor names. UNSUPPORTED:
// addresses on two devices, or on a device that this build has no kernels for.
Result<const device::CudaDevice*> find_device(std::span<const CallAddress> addresses);

}  // namespace kvx::boundary
