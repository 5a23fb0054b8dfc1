// Where the addresses of a call lie: on the host, or where one GPU reaches all of them.
#pragma once

#include <span>
#include <string_view>

#include "api/checks/deferred_errors.hpp"
#include "api/v1/views.hpp"
#include "device/cuda_caller.hpp"

namespace kvx::boundary {

struct CallAddress {
  enum class Need : uint8_t {
    kAsSaid,    // a tensor: the memory that its descriptor says
    kReadable,  // slots, tables, lengths, scales: whatever the GPU can read
  };
  std::string_view name;
  const void* address = nullptr;
  MemoryKind kind = MemoryKind::kHost;
  Need need = Need::kAsSaid;
};

inline CallAddress readable(std::string_view name, const void* address) {
  return {name, address, MemoryKind::kDevice, CallAddress::Need::kReadable};
}

// A finding when some tensors of a call are the host's and others a GPU's. Requires: a tensor
// first.
void check_one_place(std::span<const CallAddress> addresses, DeferredErrors& deferred_errors);

// The device that a call with a GPU's memory runs on; null addresses are not looked at.
// INVALID_ARGUMENT: an address is of another kind than its descriptor says. UNSUPPORTED: addresses
// of two devices, or of one without kernels.
Result<const device::CudaDevice*> find_device(std::span<const CallAddress> addresses);

}  // namespace kvx::boundary
