// Pools of TurboMind blocks in host memory for tests, and the machine to run verbs with.
#pragma once

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "engines/turbomind/layout.hpp"
#include "ops/append/append.hpp"
#include "tests/support/cpu_levels.hpp"

namespace kvx::engines::turbomind {

inline constexpr uint8_t kUntouched = 0xA5;

struct TestPool {
  TestPool(const PoolLayout& pool_layout, int num_blocks)
      : layout(pool_layout),
        data(num_blocks * layout.block_bytes, kUntouched),
        scales(num_blocks * layout.scale_block_bytes, kUntouched),
        pools{data.data(), layout.block_bytes, scales.data(), layout.scale_block_bytes,
              num_blocks} {}

  std::vector<uint8_t> data_block(int id) const {
    const auto first = data.begin() + id * layout.block_bytes;
    return {first, first + layout.block_bytes};
  }
  std::vector<uint8_t> scale_block(int id) const {
    const auto first = scales.begin() + id * layout.scale_block_bytes;
    return {first, first + layout.scale_block_bytes};
  }

  PoolLayout layout;
  std::vector<uint8_t> data;
  std::vector<uint8_t> scales;
  Pools pools;
};

inline ops::CpuContext scalar_context() {
  return tests::serial_context(device::CpuLevel::kScalar);
}

// Dense f32 [tokens, heads, head_dim].
inline FloatRows input_rows(const float* data, int num_heads, int head_dim) {
  return dense_rows(static_cast<const void*>(data), DType::kF32, num_heads, head_dim);
}

// Writes every token of a block in one layer.
inline void append_block(TestPool& pool, int layer, int block, FloatRows k, FloatRows v,
                         const GlobalScales& global = {}) {
  const auto blocks = layer_blocks(pool.layout, pool.pools, layer, global);
  ASSERT_TRUE(blocks.ok()) << blocks.error().message;
  const int block_len = pool.layout.geometry.block_len;
  std::vector<int64_t> slots(block_len);
  std::iota(slots.begin(), slots.end(), int64_t{block} * block_len);
  const auto report = ops::append(scalar_context(), {.cache = blocks.value().view(),
                                                     .transform = {},
                                                     .k = k,
                                                     .v = v,
                                                     .slot_mapping = slots,
                                                     .positions = {}});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().tokens_written, block_len);
}

}  // namespace kvx::engines::turbomind
