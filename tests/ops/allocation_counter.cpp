// Replaces operator new in ops_test by one that counts.
#include "tests/support/allocation_counter.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<int64_t> allocations{0};
}

namespace kvx::tests {
int64_t num_allocations() {
  return allocations.load();
}
}  // namespace kvx::tests

// Not inlined: the compiler would see malloc's memory given to a foreign delete. The form that
// throws nothing is replaced too: else std::stable_sort's memory came from a sanitizer's operator
// new.
__attribute__((noinline)) void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size);
}
__attribute__((noinline)) void* operator new(std::size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
