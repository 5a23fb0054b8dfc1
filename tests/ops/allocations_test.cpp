// Attend allocates nothing once it runs. (append: append_test.cpp)
#include <gtest/gtest.h>

#include "ops/attend/tiling.hpp"
#include "tests/support/allocation_counter.hpp"
#include "tests/support/attend_scene.hpp"

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
      const int64_t before = num_allocations();
      const Status status = scene.attend(level, *pool);
      EXPECT_EQ(num_allocations() - before, 0);
      EXPECT_TRUE(status.ok());
    }
  }
}

}  // namespace
}  // namespace kvx::tests
