// CallersMemory: the caller's allocator as the Memory of a cache's pools.
#pragma once

#include <cstring>
#include <optional>

#include "api/guard.hpp"
#include "cache/pool/memory.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

class CallersMemory final : public cache::Memory {
 public:
  explicit CallersMemory(const kvx_allocator_t& hook) : hook_(hook) {}

  cache::MemoryKind kind() const override { return cache::MemoryKind::kHost; }

 protected:
  Result<uint8_t*> allocate_zeroed(int64_t bytes) override {
    const auto count = static_cast<uint64_t>(bytes);
    void* data = hook_.allocate(hook_.user, count, kAlignment);
    if (data == nullptr) return out_of_range("the allocator returned null for {} bytes", bytes);
    if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0) {
      hook_.free(hook_.user, data, count);
      return invalid_argument("the allocator returned {}; expected a multiple of {}", data,
                              kAlignment);
    }
    return static_cast<uint8_t*>(memset(data, 0, count));
  }

  void free(uint8_t* data, int64_t bytes) override {
    hook_.free(hook_.user, data, static_cast<uint64_t>(bytes));
  }

 private:
  static constexpr uint64_t kAlignment = 64;  // a cache line, as cache::Region requires

  kvx_allocator_t hook_;
};

// Reads a caller's allocator. Null gives an empty result: the system's memory.
inline Result<std::optional<CallersMemory>> read_allocator(const kvx_allocator_t* allocator) {
  if (allocator == nullptr) return std::optional<CallersMemory>();
  KVX_ASSIGN_OR_RETURN(const kvx_allocator_t args, read_struct(allocator, "allocator"));
  if (args.reserved != 0) {
    return invalid_argument("allocator.reserved is {}; expected 0", args.reserved);
  }
  if (args.allocate == nullptr || args.free == nullptr) {
    return invalid_argument("allocator.{} is null", args.allocate == nullptr ? "allocate" : "free");
  }
  return std::optional<CallersMemory>(std::in_place, args);
}

}  // namespace kvx::boundary
