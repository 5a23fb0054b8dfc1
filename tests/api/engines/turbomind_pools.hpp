// TurboMind's pools in a test's memory, described through the C ABI.
#pragma once

#include <gtest/gtest.h>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test {

inline constexpr uint8_t kUntouched = 0xA5;

struct TurbomindShape {
  uint32_t mode = KVX_TURBOMIND_MODE_FP4_MX;
  uint32_t num_layers = 2;
  uint32_t num_kv_heads = 2;
  uint32_t head_dim = 32;
  uint32_t block_len = 8;
  uint32_t dtype = KVX_DTYPE_F16;
};

inline kvx_turbomind_pools_t pools_of(const TurbomindShape& shape) {
  auto pools = sized<kvx_turbomind_pools_t>();
  pools.mode = shape.mode;
  pools.dtype = shape.dtype;
  pools.num_layers = shape.num_layers;
  pools.num_kv_heads = shape.num_kv_heads;
  pools.head_dim = shape.head_dim;
  pools.block_len = shape.block_len;
  return pools;
}

// One layer of pools, as the verbs take it.
class TurbomindLayer {
 public:
  TurbomindLayer(const kvx_turbomind_pools_t& pools, uint32_t index) {
    EXPECT_EQ(kvx_turbomind_layer(&pools, index, &k_, &v_), KVX_STATUS_OK) << kvx_last_error();
    run_.num_heads = pools.num_kv_heads;
    run_.k = &k_;
    run_.v = &v_;
    layer.block_size = pools.block_len;
    layer.num_blocks = pools.num_blocks;
    layer.num_kv_heads = pools.num_kv_heads;
    layer.num_runs = 1;
    layer.runs = &runs_;
  }
  TurbomindLayer(const TurbomindLayer&) = delete;

  kvx_layer_t layer = sized<kvx_layer_t>();

 private:
  kvx_side_t k_ = sized<kvx_side_t>();
  kvx_side_t v_ = sized<kvx_side_t>();
  kvx_head_run_t run_ = sized<kvx_head_run_t>();
  const kvx_head_run_t* runs_ = &run_;
};

// Both pools, one block after the other, with a block's worth of canaries behind each.
struct TurbomindPools {
  explicit TurbomindPools(const TurbomindShape& shape, int64_t num_blocks = 6)
      : args(pools_of(shape)) {
    EXPECT_EQ(kvx_turbomind_block_sizes(&args, &sizes), KVX_STATUS_OK) << kvx_last_error();
    const auto count = static_cast<size_t>(num_blocks + 1);
    data.assign(count * sizes.block_bytes, kUntouched);
    scales.assign(count * sizes.scale_block_bytes, kUntouched);
    args.num_blocks = num_blocks;
    args.data = data.data();
    if (sizes.scale_block_bytes > 0) args.scales = scales.data();
  }
  TurbomindPools(const TurbomindPools&) = delete;

  std::span<const uint8_t> block(int64_t id) const {
    return std::span(data).subspan(static_cast<size_t>(id) * sizes.block_bytes, sizes.block_bytes);
  }
  std::span<const uint8_t> scale_block(int64_t id) const {
    return std::span(scales).subspan(static_cast<size_t>(id) * sizes.scale_block_bytes,
                                     sizes.scale_block_bytes);
  }
  // A scale byte by the formula [layer][head][token][K, V].
  uint8_t scale(uint32_t layer, uint32_t head, int64_t block_id, uint32_t token, bool is_v,
                uint32_t group) const {
    const uint32_t per_row = args.head_dim / 16;
    const size_t row = (size_t{layer} * args.num_kv_heads + head) * args.block_len + token;
    return scale_block(block_id)[row * 2 * per_row + (is_v ? per_row : 0) + group];
  }

  kvx_turbomind_pools_t args;
  kvx_turbomind_sizes_t sizes = sized<kvx_turbomind_sizes_t>();
  std::vector<uint8_t> data;
  std::vector<uint8_t> scales;
};

}  // namespace kvx::api_test
