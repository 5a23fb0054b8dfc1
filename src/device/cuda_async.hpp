// What overlaps on a CUDA device: pinned memory of the host, copies that do not wait, events
// between streams. A build without CUDA has the same functions; they say so.
#pragma once

#include <span>

#include "device/cuda.hpp"

namespace kvx::device {

// Memory of the host that devices copy from and to by themselves. OUT_OF_RANGE with the bytes when
// the system pins no more.
Result<uint8_t*> cuda_allocate_pinned(int device, int64_t bytes);
void cuda_free_pinned(uint8_t* data);

// These return when the copy is on its way; the host's side is pinned and stays as it is until the
// stream has passed it.
Status cuda_copy_async(void* to, const void* from, int64_t bytes, CudaStream stream);
// num_lines runs of line_bytes, each a stride after the one before, whatever the strides are.
Status cuda_copy_lines_async(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                             int64_t line_bytes, int64_t num_lines, CudaStream stream);
Status cuda_fill_async(void* to, uint8_t value, int64_t bytes, CudaStream stream);

// Waits for everything that a device was given, on whatever stream, and returns its first error.
Status cuda_synchronize_device(int device);

// Whether what the stream is given goes into a graph instead of to the device. Nothing may be
// allocated then, and nothing waited for.
Result<bool> cuda_is_capturing(CudaStream stream);

struct CudaCopy {
  uint8_t* to = nullptr;
  const uint8_t* from = nullptr;
  int64_t bytes = 0;
};
// Many copies by one call, which the device may make side by side: blocks that lie apart pass the
// bus as fast as one long one. Requires: the stream is not the default one.
Status cuda_copy_batch(std::span<const CudaCopy> copies, CudaStream stream);

// Memory of the current device between two points of a stream's work, for calls that are given
// none: what the stream is given from create() on may use it until this object's end. Costs about
// as much as a launch, and can be captured.
class StreamMemory {
 public:
  // OUT_OF_RANGE when the device has not that much.
  static Result<StreamMemory> create(int64_t bytes, CudaStream stream);
  StreamMemory() = default;
  StreamMemory(StreamMemory&& other) noexcept;
  StreamMemory& operator=(StreamMemory&& other) noexcept;
  ~StreamMemory();

  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  [[maybe_unused]] CudaStream stream_ = nullptr;  // unused where there is no CUDA
};

// A point in a stream's work.
class CudaEvent {
 public:
  static Result<CudaEvent> create();
  CudaEvent(CudaEvent&& other) noexcept;
  CudaEvent& operator=(CudaEvent&& other) noexcept;
  ~CudaEvent();

  // The event is what the stream was given until now.
  Status record(CudaStream stream) const;
  // Until that is done, or at once where nothing was recorded; errors of the stream's launches.
  Status wait() const;
  // What the stream is given from now on runs after the event.
  Status hold_back(CudaStream stream) const;

 private:
  explicit CudaEvent(void* event) : event_(event) {}
  [[maybe_unused]] void* event_;  // unused where there is no CUDA
};

}  // namespace kvx::device
