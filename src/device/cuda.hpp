// CUDA as the rest of kvx sees it: devices, memory, streams and graphs, errors as Status with
// CUDA's own text. A build without CUDA has the same functions; they say so.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace kvx::device {

struct CudaDevice {
  int index = 0;
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int num_multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  // Shared memory: of all CTAs of a multiprocessor together, each with what the system reserves in
  // it; and what one CTA can ask for.
  int shared_bytes_per_multiprocessor = 0;
  int shared_bytes_per_cta = 0;
  int reserved_shared_bytes = 0;
  int driver_version = 0;  // as CUDA counts: 13000 is 13.0
};

// A cudaStream_t; null is the default stream. Not owned.
using CudaStream = void*;

// UNSUPPORTED: a build without CUDA, a machine without a driver or a device, an index that is not
// there, a device older than compute capability 8.0, one for which the build has no kernels.
Result<CudaDevice> open_cuda_device(int index = 0);

// The compute capability, times ten, for which a kernel's code on the current device was compiled:
// 80 where PTX of 8.0 serves a later one. 0 when CUDA does not say; launches will say why.
int cuda_code_version(const CudaDevice& device, const void* kernel);
// The same of a kernel that is compiled for every target of the build. Others may have older code
// (listed in src/CMakeLists.txt).
int cuda_code_version(const CudaDevice& device);

// Memory of the device, whichever is current. OUT_OF_RANGE with the device and the bytes when there
// is not that much; INTERNAL_ERROR after an earlier launch broke the context.
Result<uint8_t*> cuda_allocate(int device, int64_t bytes);
void cuda_free(int device, uint8_t* data);

// Both wait until they are done; either pointer may be on the host or on the current device.
Status cuda_copy(void* to, const void* from, int64_t bytes);
Status cuda_fill(void* to, uint8_t value, int64_t bytes);

// Waits for a stream and returns the first error of its launches.
Status cuda_synchronize(CudaStream stream);

// An owned stream.
class OwnedCudaStream {
 public:
  static Result<OwnedCudaStream> create();
  OwnedCudaStream(OwnedCudaStream&& other) noexcept;
  OwnedCudaStream& operator=(OwnedCudaStream&& other) noexcept;
  ~OwnedCudaStream();
  CudaStream get() const { return stream_; }

 private:
  explicit OwnedCudaStream(CudaStream stream) : stream_(stream) {}
  CudaStream stream_;
};

// What `record` launches on a stream, kept to be launched again without its host work.
class CudaGraph {
 public:
  static Result<CudaGraph> capture(CudaStream stream, const std::function<Status()>& record);
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph& operator=(CudaGraph&& other) noexcept;
  ~CudaGraph();

  Status launch(CudaStream stream) const;
  // Milliseconds between two events around one launch. Waits.
  Result<float> time(CudaStream stream) const;

 private:
  explicit CudaGraph(void* executable) : executable_(executable) {}
  [[maybe_unused]] void* executable_;  // unused where there is no CUDA
};

}  // namespace kvx::device
