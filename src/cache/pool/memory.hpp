// Memory allocates zeroed, aligned regions of one kind of memory; a Region frees itself.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "core/result.hpp"
#include "device/cuda.hpp"

namespace kvx::cache {

enum class MemoryKind : uint8_t { kHost, kCuda };

class Memory;

// Owned memory. Zero when it is allocated; begins on 64 bytes or better.
class Region {
 public:
  Region() = default;
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  MemoryKind kind() const { return kind_; }

 private:
  friend class Memory;
  Region(Memory* owner, MemoryKind kind, uint8_t* data, int64_t bytes)
      : owner_(owner), kind_(kind), data_(data), bytes_(bytes) {}

  Memory* owner_ = nullptr;
  MemoryKind kind_ = MemoryKind::kHost;
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Outlives the regions that it allocates. allocate() may be called from several threads.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual MemoryKind kind() const = 0;

  // INVALID_ARGUMENT when bytes < 1, OUT_OF_RANGE when the machine has not that much,
  // INTERNAL_ERROR with CUDA's text when a device failed before; each names `what` the memory is
  // for.
  Result<Region> allocate(int64_t bytes, std::string_view what);
  // Zeros to part of a region. On a device this is on its way when it returns, behind what the
  // memory's stream was given before.
  virtual void clear(uint8_t* data, int64_t bytes);

 protected:
  // OUT_OF_RANGE, which names the bytes, when there is not that much. Requires: bytes > 0.
  virtual Result<uint8_t*> allocate_zeroed(int64_t bytes) = 0;
  virtual void free(uint8_t* data, int64_t bytes) = 0;

 private:
  friend class Region;
};

// The machine's main memory, on huge pages where the system has them to give. Pages are taken when
// they are first written.
Memory& host_memory();

// Memory of a CUDA device, allocated when it is asked for, whichever device is the thread's current
// one; the stream is the one that clear() goes to. UNSUPPORTED as open_cuda_device. Regions must
// not outlive the process's use of the device.
Result<std::unique_ptr<Memory>> cuda_memory(int device, device::CudaStream stream = nullptr);

// Main memory that a CUDA device copies from and to by itself. Errors as cuda_memory.
Result<std::unique_ptr<Memory>> pinned_memory(int device);

}  // namespace kvx::cache
