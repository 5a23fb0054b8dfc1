// CudaPlace: a cache's side on a device: memory, stream, and what kernels find wrong. CudaUpload:
// small tables on their way there.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cache/pool/memory.hpp"
#include "device/cuda_async.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::kv {

// Where a cache lies in a GPU's memory.
struct CudaPlacement {
  // All work goes to its stream, in order; it outlives the cache.
  ops::CudaContext context;
  // Of all entries of a step together: the step's tables pass through memory of that size.
  int max_step_tokens = 4096;
};

struct CudaPlace {
  static Result<std::unique_ptr<CudaPlace>> create(const ops::CudaContext& context);

  ops::DeviceCounters* counters() const {
    return reinterpret_cast<ops::DeviceCounters*>(counters_region.data());
  }

  ops::CudaContext context;
  std::unique_ptr<cache::Memory> memory;  // of the device, cleared on the stream
  std::unique_ptr<cache::Memory> pinned;  // of the host
  cache::Region counters_region;
};

// Tables are written to pinned memory, part after part, and sent in one copy. There are several
// such memories in turn, so that the host may be some calls ahead of the device; on the device
// there is one, since the stream keeps its order.
class CudaUpload {
 public:
  // bytes: the most that tables take between begin() and send(), each rounded up by padded().
  static Result<CudaUpload> create(const CudaPlace& place, int64_t bytes);
  static constexpr int64_t padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

  // Waits where the device is too far behind.
  Status begin();
  // The table as the device will see it. Requires: begin(), and room.
  template <class T>
  std::span<const T> add(std::span<const T> table) {
    return {reinterpret_cast<const T*>(add_bytes(table.data(), table.size_bytes())), table.size()};
  }
  // Behind what the stream was given before.
  Status send();

 private:
  static constexpr int kNumTurns = 2;

  struct Turn {
    cache::Region pinned;
    device::CudaEvent sent;
  };

  CudaUpload(device::CudaStream stream, cache::Region on_device, std::vector<Turn> turns)
      : stream_(stream), on_device_(std::move(on_device)), turns_(std::move(turns)) {}
  const uint8_t* add_bytes(const void* table, size_t bytes);

  device::CudaStream stream_;
  cache::Region on_device_;
  std::vector<Turn> turns_;
  int turn_ = 0;
  int64_t used_bytes_ = 0;
};

}  // namespace kvx::kv
