// MemoryRange: bytes that a call reads or writes, and whether two ranges overlap.
#pragma once

#include <cstdint>

namespace kvx::boundary {

struct MemoryRange {
  const void* begin = nullptr;
  int64_t bytes = 0;
};

inline bool share_memory(const MemoryRange& a, const MemoryRange& b) {
  const auto end_of = [](const MemoryRange& range) {
    return reinterpret_cast<uintptr_t>(range.begin) + static_cast<uintptr_t>(range.bytes);
  };
  return reinterpret_cast<uintptr_t>(a.begin) < end_of(b) &&
         reinterpret_cast<uintptr_t>(b.begin) < end_of(a);
}

}  // namespace kvx::boundary
