// Finds where the addresses of a call lie.
#include "api/checks/device_memory.hpp"

namespace kvx::boundary {
namespace {

using device::CudaMemoryKind;

std::string_view name_of(MemoryType kind) {
  constexpr std::string_view kNames[] = {"HOST 1", "DEVICE 2", "UNIFIED 3"};
  return kNames[static_cast<int>(kind)];
}

// DEVICE is memory that the GPU reads, pinned host memory included. UNIFIED is memory that the host
// reads as well.
bool fits(const CallAddress& address, CudaMemoryKind found) {
  if (found == CudaMemoryKind::kHost) return false;
  const bool is_unified =
      address.need == CallAddress::Need::kAsDescribed && address.kind == MemoryType::kUnified;
  return !is_unified || found != CudaMemoryKind::kDevice;
}

Error contradiction(const CallAddress& address, CudaMemoryKind found) {
  if (address.need == CallAddress::Need::kReadable) {
    return invalid_argument("{} is {}, which is {} memory; expected memory that the GPU reads",
                            address.name, address.address, device::name_of(found));
  }
  return invalid_argument("{} is {}, which is {} memory; its descriptor has {}", address.name,
                          address.address, device::name_of(found), name_of(address.kind));
}

}  // namespace

void check_one_place(std::span<const CallAddress> addresses, DeferredErrors& deferred_errors) {
  const CallAddress& first = addresses.front();
  for (const CallAddress& tensor : addresses) {
    if (tensor.need != CallAddress::Need::kAsDescribed) continue;
    if ((tensor.kind == MemoryType::kHost) == (first.kind == MemoryType::kHost)) continue;
    deferred_errors.add(
        unsupported("{} is {} memory and {} {}; expected all tensors on the host, or all in a "
                    "GPU's reach",
                    tensor.name, name_of(tensor.kind), first.name, name_of(first.kind)));
    return;
  }
}

Result<const device::CudaDevice*> find_device(std::span<const CallAddress> addresses) {
  const CallAddress* first = nullptr;  // the first address on a device
  int index = 0;
  for (const CallAddress& address : addresses) {
    if (address.address == nullptr) continue;
    KVX_ASSIGN_OR_RETURN(const device::CudaAddress found,
                         device::find_cuda_address(address.address));
    if (!fits(address, found.kind)) return contradiction(address, found.kind);
    if (found.kind != CudaMemoryKind::kDevice) continue;
    if (first == nullptr) {
      first = &address;
      index = found.device;
    } else if (found.device != index) {
      return unsupported("{} lies on CUDA device {} and {} on {}; a call runs on one device",
                         address.name, found.device, first->name, index);
    }
  }
  if (first == nullptr) {  // managed memory has no device of its own
    KVX_ASSIGN_OR_RETURN(index, device::current_cuda_device());
  }
  return device::known_cuda_device(index);
}

}  // namespace kvx::boundary
