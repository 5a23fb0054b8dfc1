// The CUDA runtime's calls behind device/cuda_ipc.hpp.
#include "device/cuda_ipc.hpp"

#include <cuda_runtime_api.h>

#include <cstring>

#include "device/cuda_caller.hpp"

namespace kvx::device {
namespace {

Error unsupported_by_cuda(const char* call, cudaError_t error) {
  cudaGetLastError();  // not sticky: the next call shall not see it
  return unsupported("{}: {}", call, cudaGetErrorString(error));
}

}  // namespace

Result<std::vector<uint8_t>> cuda_ipc_handle(const uint8_t* data) {
  cudaIpcMemHandle_t handle;
  const cudaError_t error = cudaIpcGetMemHandle(&handle, const_cast<uint8_t*>(data));
  if (error != cudaSuccess) return unsupported_by_cuda("cudaIpcGetMemHandle", error);
  std::vector<uint8_t> bytes(sizeof handle);
  std::memcpy(bytes.data(), &handle, sizeof handle);
  return bytes;
}

Result<CudaIpcMemory> CudaIpcMemory::open(int device, std::span<const uint8_t> bytes) {
  cudaIpcMemHandle_t handle;
  if (bytes.size() != sizeof handle) {
    return invalid_argument("a handle of CUDA IPC has {} bytes; expected {}", bytes.size(),
                            sizeof handle);
  }
  std::memcpy(&handle, bytes.data(), sizeof handle);
  KVX_ASSIGN_OR_RETURN(const auto current, CurrentCudaDevice::set(device));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return unsupported_by_cuda("cudaIpcOpenMemHandle", error);
  return CudaIpcMemory(device, static_cast<uint8_t*>(data));
}

CudaIpcMemory::~CudaIpcMemory() {
  if (data_ == nullptr) return;
  const Result<CurrentCudaDevice> current = CurrentCudaDevice::set(device_);
  cudaIpcCloseMemHandle(data_);
}

}  // namespace kvx::device
