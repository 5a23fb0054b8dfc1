// device/cuda*.hpp in a build without CUDA: every call returns that error. Only what
// looks for a device can be reached, since all else needs one.
#include "device/cuda.hpp"
#include "device/cuda_async.hpp"
#include "device/cuda_bandwidth.hpp"
#include "device/cuda_caller.hpp"
#include "device/cuda_ipc.hpp"
#include "device/memory_size.hpp"

namespace kvx::device {
namespace {

Error no_cuda() {
  return unsupported("this build of kvx has no CUDA (KVX_CUDA was OFF, or nvcc was not found)");
}

}  // namespace

Result<CudaDevice> open_cuda_device(int) {
  return no_cuda();
}
Result<const CudaDevice*> known_cuda_device(int) {
  return no_cuda();
}
Status check_usable_cuda_device() {
  return no_cuda();
}
Result<CudaAddress> find_cuda_address(const void*) {
  return no_cuda();
}
Result<int> current_cuda_device() {
  return no_cuda();
}
Result<CurrentCudaDevice> CurrentCudaDevice::set(int) {
  return no_cuda();
}
CurrentCudaDevice::CurrentCudaDevice(CurrentCudaDevice&& other) noexcept = default;
CurrentCudaDevice::~CurrentCudaDevice() = default;
int cuda_code_version(const CudaDevice&, const void*) {
  return 0;
}
int cuda_code_version(const CudaDevice&) {
  return 0;
}
Result<uint8_t*> cuda_allocate(int, int64_t) {
  return no_cuda();
}
void cuda_free(int, uint8_t*) {}
Status cuda_copy(void*, const void*, int64_t) {
  return no_cuda();
}
Status cuda_fill(void*, uint8_t, int64_t) {
  return no_cuda();
}
Status cuda_synchronize(CudaStream) {
  return no_cuda();
}
Status cuda_synchronize_device(int) {
  return no_cuda();
}
Result<bool> cuda_is_capturing(CudaStream) {
  return no_cuda();
}

Status cuda_launch_read(const CudaDevice&, CudaStream, const uint8_t*, int64_t, uint8_t*) {
  return no_cuda();
}
Status cuda_launch_copy(const CudaDevice&, CudaStream, const uint8_t*, int64_t, uint8_t*) {
  return no_cuda();
}
Status cuda_launch_memcpy(CudaStream, const void*, int64_t, void*) {
  return no_cuda();
}
Status cuda_launch_nothing(CudaStream) {
  return no_cuda();
}

Result<OwnedCudaStream> OwnedCudaStream::create() {
  return no_cuda();
}
OwnedCudaStream::OwnedCudaStream(OwnedCudaStream&&) noexcept = default;
OwnedCudaStream& OwnedCudaStream::operator=(OwnedCudaStream&&) noexcept = default;
OwnedCudaStream::~OwnedCudaStream() = default;

Result<uint8_t*> cuda_allocate_pinned(int, int64_t) {
  return no_cuda();
}
void cuda_free_pinned(uint8_t*) {}
Result<int64_t> cuda_free_bytes(int) {
  return no_cuda();
}
Status cuda_copy_async(void*, const void*, int64_t, CudaStream) {
  return no_cuda();
}
Status cuda_copy_lines_async(void*, int64_t, const void*, int64_t, int64_t, int64_t, CudaStream) {
  return no_cuda();
}
Status cuda_fill_async(void*, uint8_t, int64_t, CudaStream) {
  return no_cuda();
}
Status cuda_copy_batch(std::span<const CudaCopy>, CudaStream) {
  return no_cuda();
}

Result<std::vector<uint8_t>> cuda_ipc_handle(const uint8_t*) {
  return no_cuda();
}
Result<CudaIpcMemory> CudaIpcMemory::open(int, std::span<const uint8_t>) {
  return no_cuda();
}
CudaIpcMemory::~CudaIpcMemory() = default;

Result<StreamMemory> StreamMemory::create(int64_t, CudaStream) {
  return no_cuda();
}
StreamMemory::StreamMemory(StreamMemory&&) noexcept = default;
StreamMemory& StreamMemory::operator=(StreamMemory&&) noexcept = default;
StreamMemory::~StreamMemory() = default;
Result<CudaEvent> CudaEvent::create() {
  return no_cuda();
}
CudaEvent::CudaEvent(CudaEvent&&) noexcept = default;
CudaEvent& CudaEvent::operator=(CudaEvent&&) noexcept = default;
CudaEvent::~CudaEvent() = default;
Status CudaEvent::record(CudaStream) const {
  return no_cuda();
}
Status CudaEvent::wait() const {
  return no_cuda();
}
Status CudaEvent::hold_back(CudaStream) const {
  return no_cuda();
}

Result<CudaGraph> CudaGraph::capture(CudaStream, const std::function<Status()>&) {
  return no_cuda();
}
CudaGraph::CudaGraph(CudaGraph&&) noexcept = default;
CudaGraph& CudaGraph::operator=(CudaGraph&&) noexcept = default;
CudaGraph::~CudaGraph() = default;
Status CudaGraph::launch(CudaStream) const {
  return no_cuda();
}
Result<float> CudaGraph::time(CudaStream) const {
  return no_cuda();
}

}  // namespace kvx::device
