// Memory: the interface's checks, and the machine's main memory by mmap.
#include "cache/pool/memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/checked.hpp"
#include "core/log.hpp"

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

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

uint8_t* map_zeroed(int64_t bytes) {
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<uint8_t*>(data);
}

class HostMemory final : public Memory {
 public:
  MemoryKind kind() const override { return MemoryKind::kHost; }

 protected:
  Result<uint8_t*> allocate_zeroed(int64_t bytes) override {
    uint8_t* data = bytes < kHugePageBytes ? map_zeroed(bytes) : map_on_huge_pages(bytes);
    if (data == nullptr) return out_of_range("no memory for {} bytes", bytes);
    return data;
  }
  void free(uint8_t* data, int64_t bytes) override { munmap(data, bytes); }

 private:
  // A huge page must begin on its own size: one page too much is mapped and the ends are given
  // back.
  static uint8_t* map_on_huge_pages(int64_t bytes) {
    constexpr int64_t kPageBytes = 4096;
    const auto rounded = (CheckedSize(bytes) + (kPageBytes - 1)).get();
    const auto with_spare = (CheckedSize(bytes) + (kPageBytes - 1) + kHugePageBytes).get();
    if (!rounded || !with_spare) return nullptr;
    const int64_t kept = *rounded / kPageBytes * kPageBytes;
    uint8_t* mapped = map_zeroed(kept + kHugePageBytes);
    if (!mapped) return nullptr;
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped));
    const int64_t before = round_up(address, kHugePageBytes) - address;
    if (before > 0) munmap(mapped, before);
    if (before < kHugePageBytes) munmap(mapped + before + kept, kHugePageBytes - before);
    // Advice only: without huge pages the memory works the same.
    if (madvise(mapped + before, kept, MADV_HUGEPAGE) != 0) {
      log(LogLevel::kWarning, "no huge pages for {} bytes: {}", bytes,
          std::generic_category().message(errno));
    }
    return mapped + before;
  }
};

}  // namespace

Memory& host_memory() {
  // Never destroyed: regions in static objects may outlive any static.
  static Memory* const memory = new HostMemory;
  return *memory;
}

}  // namespace kvx::cache
