// Memory of a CUDA device that several processes of one host use: a process hands out a handle,
// another one maps the memory by it, on the same device or on one that reaches it over NVLink or
// PCIe. A build without CUDA has the same functions; they say so.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/result.hpp"

namespace kvx::device {

// Allocations of whole multiples of this are allocations by themselves, as handles need them: CUDA
// puts smaller ones together.
inline constexpr int64_t kCudaIpcBytes = int64_t{2} << 20;

// Requires: data is the beginning of an allocation of cuda_allocate(), of a multiple of
// kCudaIpcBytes. UNSUPPORTED: the system has no such handles.
Result<std::vector<uint8_t>> cuda_ipc_handle(const uint8_t* data);

// Another process's memory, as long as this lives. What that process does to it is not seen here.
class CudaIpcMemory {
 public:
  // UNSUPPORTED with CUDA's text: the memory cannot be mapped, as in the process that has it, in a
  // container of its own, or on a device that does not reach it; INVALID_ARGUMENT: no handle.
  static Result<CudaIpcMemory> open(int device, std::span<const uint8_t> handle);
  CudaIpcMemory(CudaIpcMemory&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)) {}
  CudaIpcMemory& operator=(CudaIpcMemory&&) = delete;
  ~CudaIpcMemory();

  const uint8_t* data() const { return data_; }

 private:
  CudaIpcMemory(int device, uint8_t* data) : device_(device), data_(data) {}

  [[maybe_unused]] int device_;  // unused where there is no CUDA
  uint8_t* data_;
};

}  // namespace kvx::device
