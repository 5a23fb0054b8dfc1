// Verbs allocate nothing once they run. This file replaces the binary's operator new to count.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "ops/attend/tiling.hpp"
#include "tests/support/attend_scene.hpp"

namespace {
std::atomic<int64_t> num_allocations{0};
}

// Not inlined: the compiler would see malloc's memory given to a foreign delete.
__attribute__((noinline)) void* operator new(size_t size) {
  ++num_allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace kvx::tests {
namespace {

TEST(Allocations, AttendAllocatesNothingAndItsScratchDoesNotGrowWithTheLength) {
  // A piece's memory is one struct on its thread's stack, whatever the length.
  static_assert(sizeof(ops::AttendScratch) <= 64 * 1024);
  const auto pool = make_thread_pool(2);
  for (int seq_len : {40, 4000}) {
    SceneOptions options;
    options.runs = {{2, "int8", "nvfp4"}};
    options.seq_lens = {seq_len};
    options.q_lens = {30};
    options.k_mean = options.k_offset = options.v_mean = options.v_hadamard = true;
    AttendScene scene(options);
    for (CpuLevel level : supported_levels()) {
      ASSERT_TRUE(scene.attend(level, *pool).ok());
      const int64_t before = num_allocations;
      const Status status = scene.attend(level, *pool);
      EXPECT_EQ(num_allocations - before, 0);
      EXPECT_TRUE(status.ok());
    }
  }
}

}  // namespace
}  // namespace kvx::tests
