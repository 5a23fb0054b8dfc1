// The CUDA runtime's calls behind device/cuda.hpp and device/cuda_caller.hpp.
#include "device/cuda.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "device/cuda_caller.hpp"
#include "device/cuda_error.hpp"
#include "device/cuda_targets.hpp"

namespace kvx::device {
namespace {

cudaStream_t stream_of(CudaStream stream) {
  return static_cast<cudaStream_t>(stream);
}

class Event {
 public:
  Event() { cudaEventCreate(&event_); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

Result<CudaDevice> find_cuda_device(int index) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    return unsupported("no CUDA device: {}", cudaGetErrorString(error));
  }
  if (index < 0 || index >= count) {
    return unsupported("CUDA device {} is not there; this machine has {}", index, count);
  }
  cudaDeviceProp found;
  KVX_RETURN_IF_ERROR(
      cuda_status(cudaGetDeviceProperties(&found, index), "cudaGetDeviceProperties"));
  CudaDevice device;
  device.index = index;
  device.name = found.name;
  device.compute_major = found.major;
  device.compute_minor = found.minor;
  device.num_multiprocessors = found.multiProcessorCount;
  device.memory_bytes = static_cast<int64_t>(found.totalGlobalMem);
  device.l2_bytes = found.l2CacheSize;
  device.shared_bytes_per_multiprocessor = static_cast<int>(found.sharedMemPerMultiprocessor);
  device.shared_bytes_per_cta = static_cast<int>(found.sharedMemPerBlockOptin);
  device.reserved_shared_bytes = static_cast<int>(found.reservedSharedMemPerBlock);
  cudaDriverGetVersion(&device.driver_version);
  KVX_RETURN_IF_ERROR(check_has_kernels(device, KVX_CUDA_TARGETS));
  return device;
}

// At least one entry: where there is no device, why.
const std::vector<Result<CudaDevice>>& known_devices() {
  static const std::vector<Result<CudaDevice>> devices = [] {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    std::vector<Result<CudaDevice>> found;
    for (int i = 0; i < std::max(count, 1); ++i) found.push_back(find_cuda_device(i));
    return found;
  }();
  return devices;
}

}  // namespace

Result<CudaDevice> open_cuda_device(int index) {
  KVX_ASSIGN_OR_RETURN(CudaDevice device, find_cuda_device(index));
  KVX_RETURN_IF_ERROR(cuda_status(cudaSetDevice(index), "cudaSetDevice"));
  return device;
}

Result<const CudaDevice*> known_cuda_device(int index) {
  const auto& devices = known_devices();
  if (index < 0 || index >= std::ssize(devices)) {
    if (!devices.front().ok()) return devices.front().error();
    return unsupported("CUDA device {} is not there; this machine has {}", index, devices.size());
  }
  const Result<CudaDevice>& device = devices[static_cast<size_t>(index)];
  if (!device.ok()) return device.error();
  return &device.value();
}

Status check_usable_cuda_device() {
  const auto& devices = known_devices();
  const auto is_usable = [](const Result<CudaDevice>& device) { return device.ok(); };
  if (std::any_of(devices.begin(), devices.end(), is_usable)) return {};
  return devices.front().error();
}

Result<CudaAddress> find_cuda_address(const void* address) {
  cudaPointerAttributes found;
  KVX_RETURN_IF_ERROR(
      cuda_status(cudaPointerGetAttributes(&found, address), "cudaPointerGetAttributes"));
  switch (found.type) {
    case cudaMemoryTypeHost: {
      const bool is_read_there = found.devicePointer == address;  // or at another address
      return CudaAddress{is_read_there ? CudaMemoryKind::kPinned : CudaMemoryKind::kHost,
                         found.device};
    }
    case cudaMemoryTypeDevice:
      return CudaAddress{CudaMemoryKind::kDevice, found.device};
    case cudaMemoryTypeManaged:
      return CudaAddress{CudaMemoryKind::kManaged, found.device};
    default:
      return CudaAddress{};
  }
}

Result<int> current_cuda_device() {
  int index = 0;
  KVX_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&index), "cudaGetDevice"));
  return index;
}

Result<CurrentCudaDevice> CurrentCudaDevice::set(int index) {
  KVX_ASSIGN_OR_RETURN(const int previous, current_cuda_device());
  if (previous == index) return CurrentCudaDevice(-1);
  KVX_RETURN_IF_ERROR(cuda_status(cudaSetDevice(index), "cudaSetDevice"));
  return CurrentCudaDevice(previous);
}

CurrentCudaDevice::CurrentCudaDevice(CurrentCudaDevice&& other) noexcept
    : previous_(std::exchange(other.previous_, -1)) {}

CurrentCudaDevice::~CurrentCudaDevice() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

Result<uint8_t*> cuda_allocate(int device, int64_t bytes) {
  KVX_ASSIGN_OR_RETURN(const auto current, CurrentCudaDevice::set(device));
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky: the next call shall not see it
    return out_of_range("CUDA device {} has no {} bytes of memory left", device, bytes);
  }
  KVX_RETURN_IF_ERROR(cuda_status(error, "cudaMalloc"));
  return static_cast<uint8_t*>(data);
}

void cuda_free(int device, uint8_t* data) {
  const Result<CurrentCudaDevice> current = CurrentCudaDevice::set(device);
  cudaFree(data);
}

Status cuda_copy(void* to, const void* from, int64_t bytes) {
  KVX_RETURN_IF_ERROR(cuda_status(
      cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault), "cudaMemcpy"));
  // From pageable memory it returns when the bytes have left there, and between two places on the
  // device at once: a stream that waits for no other could read what was there before.
  return cuda_synchronize(nullptr);
}

Status cuda_fill(void* to, uint8_t value, int64_t bytes) {
  KVX_RETURN_IF_ERROR(cuda_status(cudaMemset(to, value, static_cast<size_t>(bytes)), "cudaMemset"));
  return cuda_synchronize(nullptr);
}

Status cuda_synchronize(CudaStream stream) {
  return cuda_status(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

Result<OwnedCudaStream> OwnedCudaStream::create() {
  cudaStream_t stream = nullptr;
  KVX_RETURN_IF_ERROR(cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                  "cudaStreamCreateWithFlags"));
  return OwnedCudaStream(stream);
}

OwnedCudaStream::OwnedCudaStream(OwnedCudaStream&& other) noexcept
    : stream_(std::exchange(other.stream_, nullptr)) {}

OwnedCudaStream& OwnedCudaStream::operator=(OwnedCudaStream&& other) noexcept {
  std::swap(stream_, other.stream_);
  return *this;
}

OwnedCudaStream::~OwnedCudaStream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_of(stream_));
}

Result<CudaGraph> CudaGraph::capture(CudaStream stream, const std::function<Status()>& record) {
  KVX_RETURN_IF_ERROR(
      cuda_status(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal),
                  "cudaStreamBeginCapture"));
  const Status recorded = record();
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream_of(stream), &graph);
  const Status captured = cuda_status(ended, "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  Status made;
  if (recorded.ok() && captured.ok()) {
    made = cuda_status(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  KVX_RETURN_IF_ERROR(recorded);
  KVX_RETURN_IF_ERROR(captured);
  KVX_RETURN_IF_ERROR(made);
  return CudaGraph(executable);
}

CudaGraph::CudaGraph(CudaGraph&& other) noexcept
    : executable_(std::exchange(other.executable_, nullptr)) {}

CudaGraph& CudaGraph::operator=(CudaGraph&& other) noexcept {
  std::swap(executable_, other.executable_);
  return *this;
}

CudaGraph::~CudaGraph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
}

Status CudaGraph::launch(CudaStream stream) const {
  return cuda_status(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), stream_of(stream)),
                     "cudaGraphLaunch");
}

Result<float> CudaGraph::time(CudaStream stream) const {
  const Event begin;
  const Event end;
  cudaEventRecord(begin.get(), stream_of(stream));
  KVX_RETURN_IF_ERROR(launch(stream));
  cudaEventRecord(end.get(), stream_of(stream));
  KVX_RETURN_IF_ERROR(cuda_status(cudaEventSynchronize(end.get()), "cudaEventSynchronize"));
  float milliseconds = 0;
  KVX_RETURN_IF_ERROR(cuda_status(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()),
                                  "cudaEventElapsedTime"));
  return milliseconds;
}

}  // namespace kvx::device
