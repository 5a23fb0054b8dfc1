// Whole TurboMind blocks written by append, byte for byte what the oracle writes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/engines/turbomind_golden.hpp"
#include "tests/engines/turbomind_pool.hpp"
#include "tests/support/compare_bytes.hpp"

namespace kvx::engines::turbomind {
namespace {

using ::testing::Each;

// One layer of numbers [layer][head][token][dim] as [token, head, dim] rows.
FloatRows layer_rows(const std::vector<uint8_t>& memory, const PoolLayout& layout, int layer) {
  const Geometry& geometry = layout.geometry;
  const int64_t head_numbers = int64_t{geometry.block_len} * geometry.head_dim;
  const int64_t layer_bytes = geometry.num_kv_heads * head_numbers * bytes_of(geometry.dtype);
  return {memory.data() + layer * layer_bytes, geometry.dtype, geometry.head_dim, head_numbers};
}

TEST(TurboMindBytes, AreTheOraclesForPolicies0And4And8And16) {
  const auto& cases = golden_file().at("written");
  ASSERT_EQ(cases.size(), 10u);  // four policies and policy 16's second block, in f16 and bf16
  for (const auto& written : cases) {
    SCOPED_TRACE(shape_text(written) + " " + written.at("dtype").get<std::string>());
    const DType dtype = tests::dtype_named(written.at("dtype"));
    const auto layout = make_pool_layout(geometry_of(written, dtype));
    ASSERT_TRUE(layout.ok());
    const std::vector<uint8_t> keys = tests::memory_of(dtype, written.at("keys"));
    const std::vector<uint8_t> values = tests::memory_of(dtype, written.at("values"));
    TestPool pool(layout.value(), 3);
    for (int layer = 0; layer < layout.value().geometry.num_layers; ++layer) {
      append_block(pool, layer, 1, layer_rows(keys, layout.value(), layer),
                   layer_rows(values, layout.value(), layer));
    }
    EXPECT_TRUE(tests::same_bytes(tests::bytes_of_hex(written.at("block")), pool.data_block(1)));
    EXPECT_TRUE(
        tests::same_bytes(tests::bytes_of_hex(written.at("scale_block")), pool.scale_block(1)));
    for (const int other : {0, 2}) {
      EXPECT_THAT(pool.data_block(other), Each(kUntouched));
      EXPECT_THAT(pool.scale_block(other), Each(kUntouched));
    }
  }
}

TEST(TurboMindBytes, PackFourBitCodes0To7As20_64_31_75) {
  const auto layout = make_pool_layout({KvCacheMode::kInt4, DType::kF16, 1, 1, 16, 1});
  ASSERT_TRUE(layout.ok());
  TestPool pool(layout.value(), 1);
  float row[16];
  std::iota(row, row + 16, 0.0f);  // scale 1, zero 0: the codes are the numbers
  const FloatRows rows = input_rows(row, 1, 16);
  append_block(pool, 0, 0, rows, rows);
  EXPECT_EQ(std::vector<uint8_t>(pool.data.begin(), pool.data.begin() + 8),
            (std::vector<uint8_t>{0x20, 0x64, 0x31, 0x75, 0xA8, 0xEC, 0xB9, 0xFD}));
  // K's parameters lie behind K's and V's data: scale 1 and zero 0 in f16.
  EXPECT_EQ(std::vector<uint8_t>(pool.data.begin() + 16, pool.data.begin() + 20),
            (std::vector<uint8_t>{0x00, 0x3C, 0x00, 0x00}));
}

// The fork's 32-layer case, written for real: its layers 30 and 31 land behind the block.
TEST(TurboMindBytes, StayInsideTheBlockAt32Layers) {
  const auto layout = make_pool_layout({KvCacheMode::kFp4Mx, DType::kF16, 32, 8, 128, 64});
  ASSERT_TRUE(layout.ok());
  TestPool pool(layout.value(), 2);
  const std::vector<float> rows(64 * 8 * 128, 1.0f);
  const FloatRows ones = input_rows(rows.data(), 8, 128);
  for (int layer = 0; layer < 32; ++layer) append_block(pool, layer, 0, ones, ones);
  // amax 1 is at most 6 * 2^-2: exponent byte 125, and 1 / 2^-2 = 4 is code 6.
  EXPECT_THAT(pool.data_block(0), Each(0x66));
  EXPECT_THAT(pool.scale_block(0), Each(125));
  EXPECT_THAT(pool.data_block(1), Each(kUntouched));
  EXPECT_THAT(pool.scale_block(1), Each(kUntouched));
}

}  // namespace
}  // namespace kvx::engines::turbomind
