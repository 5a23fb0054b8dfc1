// The CUDA runtime's calls behind device/cuda_async.hpp.
#include "device/cuda_async.hpp"

#include <cuda_runtime_api.h>

#include <utility>
#include <vector>

#include "device/cuda_caller.hpp"
#include "device/cuda_error.hpp"
#include "device/memory_size.hpp"

namespace kvx::device {
namespace {

cudaStream_t stream_of(CudaStream stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

Result<uint8_t*> cuda_allocate_pinned(int device, int64_t bytes) {
  KVX_ASSIGN_OR_RETURN(const auto current, CurrentCudaDevice::set(device));
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky: the next call shall not see it
    return out_of_range("the system pins no {} bytes of host memory", bytes);
  }
  KVX_RETURN_IF_ERROR(cuda_status(error, "cudaHostAlloc"));
  return static_cast<uint8_t*>(data);
}

Result<int64_t> cuda_free_bytes(int device) {
  KVX_RETURN_IF_ERROR(known_cuda_device(device));
  KVX_ASSIGN_OR_RETURN(const auto current, CurrentCudaDevice::set(device));
  size_t num_free = 0;
  size_t num_all = 0;
  KVX_RETURN_IF_ERROR(cuda_status(cudaMemGetInfo(&num_free, &num_all), "cudaMemGetInfo"));
  return static_cast<int64_t>(num_free);
}

void cuda_free_pinned(uint8_t* data) {
  cudaFreeHost(data);
}

Status cuda_copy_async(void* to, const void* from, int64_t bytes, CudaStream stream) {
  return cuda_status(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_of(stream)),
      "cudaMemcpyAsync");
}

Status cuda_copy_lines_async(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                             int64_t line_bytes, int64_t num_lines, CudaStream stream) {
  // CUDA takes no stride that is shorter than a line: of a line alone, or of one that is repeated.
  if (to_stride < line_bytes || from_stride < line_bytes) {
    for (int64_t i = 0; i < num_lines; ++i) {
      KVX_RETURN_IF_ERROR(cuda_copy_async(static_cast<uint8_t*>(to) + i * to_stride,
                                          static_cast<const uint8_t*>(from) + i * from_stride,
                                          line_bytes, stream));
    }
    return {};
  }
  const auto size = [](int64_t bytes) { return static_cast<size_t>(bytes); };
  return cuda_status(
      cudaMemcpy2DAsync(to, size(to_stride), from, size(from_stride), size(line_bytes),
                        size(num_lines), cudaMemcpyDefault, stream_of(stream)),
      "cudaMemcpy2DAsync");
}

Status cuda_fill_async(void* to, uint8_t value, int64_t bytes, CudaStream stream) {
  return cuda_status(cudaMemsetAsync(to, value, static_cast<size_t>(bytes), stream_of(stream)),
                     "cudaMemsetAsync");
}

Status cuda_synchronize_device(int device) {
  KVX_ASSIGN_OR_RETURN(const auto current, CurrentCudaDevice::set(device));
  return cuda_status(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Result<bool> cuda_is_capturing(CudaStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  KVX_RETURN_IF_ERROR(
      cuda_status(cudaStreamIsCapturing(stream_of(stream), &status), "cudaStreamIsCapturing"));
  return status != cudaStreamCaptureStatusNone;
}

Status cuda_copy_batch(std::span<const CudaCopy> copies, CudaStream stream) {
#if CUDART_VERSION >= 13000
  if (copies.empty()) return {};
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<size_t> sizes;
  for (const CudaCopy& copy : copies) {
    targets.push_back(copy.to);
    sources.push_back(copy.from);
    sizes.push_back(static_cast<size_t>(copy.bytes));
  }
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;  // the attributes hold from the first copy on
  return cuda_status(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(),
                                          sizes.size(), &attributes, &first, 1, stream_of(stream)),
                     "cudaMemcpyBatchAsync");
#else
  for (const CudaCopy& copy : copies) {
    KVX_RETURN_IF_ERROR(cuda_copy_async(copy.to, copy.from, copy.bytes, stream));
  }
  return {};
#endif
}

Result<StreamMemory> StreamMemory::create(int64_t bytes, CudaStream stream) {
  void* data = nullptr;
  const cudaError_t error = cudaMallocAsync(&data, static_cast<size_t>(bytes), stream_of(stream));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky: the next call shall not see it
    return out_of_range("the device has no {} bytes for the time of a call", bytes);
  }
  KVX_RETURN_IF_ERROR(cuda_status(error, "cudaMallocAsync"));
  StreamMemory memory;
  memory.data_ = static_cast<uint8_t*>(data);
  memory.stream_ = stream;
  return memory;
}

StreamMemory::StreamMemory(StreamMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), stream_(other.stream_) {}

StreamMemory& StreamMemory::operator=(StreamMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(stream_, other.stream_);
  return *this;
}

StreamMemory::~StreamMemory() {
  if (data_ != nullptr) cudaFreeAsync(data_, stream_of(stream_));
}

Result<CudaEvent> CudaEvent::create() {
  cudaEvent_t event = nullptr;
  KVX_RETURN_IF_ERROR(cuda_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                                  "cudaEventCreateWithFlags"));
  return CudaEvent(event);
}

CudaEvent::CudaEvent(CudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

CudaEvent& CudaEvent::operator=(CudaEvent&& other) noexcept {
  std::swap(event_, other.event_);
  return *this;
}

CudaEvent::~CudaEvent() {
  if (event_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}

Status CudaEvent::record(CudaStream stream) const {
  return cuda_status(cudaEventRecord(static_cast<cudaEvent_t>(event_), stream_of(stream)),
                     "cudaEventRecord");
}

Status CudaEvent::wait() const {
  return cuda_status(cudaEventSynchronize(static_cast<cudaEvent_t>(event_)),
                     "cudaEventSynchronize");
}

Status CudaEvent::hold_back(CudaStream stream) const {
  return cuda_status(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event_), 0),
                     "cudaStreamWaitEvent");
}

}  // namespace kvx::device
