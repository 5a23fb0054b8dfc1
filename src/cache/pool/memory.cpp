// Memory: the interface's checks, and the machine's main memory.
#include "cache/pool/memory.hpp"

#include <cstring>
#include <utility>

#include "core/os/os.hpp"

namespace kvx::cache {

Region::Region(Region&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)),
      kind_(other.kind_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(kind_, other.kind_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Region::~Region() {
  if (owner_) owner_->free(data_, bytes_);
}

Result<Region> Memory::allocate(int64_t bytes, std::string_view what) {
  if (bytes < 1) return invalid_argument("{}: bytes is {}; expected 1 or more", what, bytes);
  const Result<uint8_t*> data = allocate_zeroed(bytes);
  if (!data.ok()) {
    return Error{data.error().code, fmt::format("{}: {}", what, data.error().message)};
  }
  return Region(this, kind(), data.value(), bytes);
}

void Memory::clear(uint8_t* data, int64_t bytes) {
  std::memset(data, 0, static_cast<size_t>(bytes));
}

namespace {

class HostMemory final : public Memory {
 public:
  MemoryKind kind() const override { return MemoryKind::kHost; }

 protected:
  Result<uint8_t*> allocate_zeroed(int64_t bytes) override {
    uint8_t* data = os::map_zeroed(bytes);
    if (data == nullptr) return out_of_range("no memory for {} bytes", bytes);
    return data;
  }
  void free(uint8_t* data, int64_t bytes) override { os::unmap(data, bytes); }
};

}  // namespace

Memory& host_memory() {
  // Never destroyed: regions in static objects may outlive any static.
  static Memory* const memory = new HostMemory;
  return *memory;
}

}  // namespace kvx::cache
