// Sizes of contiguous caches, computed without allocating them, and what is refused.
#include "kv/contiguous/contiguous_layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace kvx::kv::contiguous_layout_test {
namespace {

using ::testing::HasSubstr;

ContiguousConfig config_of(std::string_view recipe) {
  ContiguousConfig config;
  config.geometry = {.num_layers = 32,
                     .num_kv_heads = 8,
                     .k_head_dim = 128,
                     .v_head_dim = 128,
                     .layer_windows = {}};
  config.recipe = parse_recipe(recipe).value();
  config.batch_size = 1;
  config.num_q_heads = 32;
  config.max_seq_len = 4096;
  return config;
}

int64_t bytes_of(const ContiguousConfig& config) {
  const Result<int64_t> bytes = contiguous_bytes(config);
  EXPECT_TRUE(bytes.ok()) << (bytes.ok() ? "" : bytes.error().message);
  return bytes.ok() ? bytes.value() : -1;
}

std::string message_of(const ContiguousConfig& config) {
  const auto plans = plan_contiguous(config);
  return plans.ok() ? "accepted" : plans.error().message;
}

TEST(ContiguousLayout, Takes512MiBFor16BitAnd138MBForPackedRows) {
  EXPECT_EQ(bytes_of(config_of("f16")), 536'870'912);
  EXPECT_EQ(bytes_of(config_of("bf16")), 536'870'912);
  EXPECT_EQ(bytes_of(config_of("fp4_row")), 138'412'032);
  EXPECT_EQ(bytes_of(config_of("int4_row")), 138'412'032);
}

TEST(ContiguousLayout, TakesEightTimesThatFor32KTokens) {
  ContiguousConfig config = config_of("f16");
  config.max_seq_len = 32'768;
  EXPECT_EQ(bytes_of(config), int64_t{4} << 30);
  config.recipe = parse_recipe("fp4_row").value();
  EXPECT_EQ(bytes_of(config), 8 * 138'412'032LL);
}

// Layers x 2 x batch x heads x window x head_dim x bytes, not window x head_dim.
TEST(ContiguousLayout, IsBoundedByTheWindowAndCountsEveryLayerHeadAndSequence) {
  ContiguousConfig config = config_of("f16");
  config.batch_size = 3;
  config.geometry.layer_windows.assign(32, 512);
  EXPECT_EQ(bytes_of(config), 32LL * 2 * 3 * 8 * 512 * 128 * 2);
  config.max_append = 65;
  EXPECT_EQ(bytes_of(config), 32LL * 2 * 3 * 8 * (512 + 64) * 128 * 2);
  config.max_seq_len = 100;  // fewer than a window
  EXPECT_EQ(bytes_of(config), 32LL * 2 * 3 * 8 * 100 * 128 * 2);
}

TEST(ContiguousLayout, CountsEachLayerInItsOwnFormatAndWindow) {
  ContiguousConfig config = config_of("int8/int4_row");
  config.geometry.num_layers = 2;
  config.geometry.layer_windows = {0, 128};
  config.overrides = {parse_layer_override("1=bf16").value()};
  const int64_t int8_row = 128 + 2 * 2, int4_row = 64 + 2;  // two groups of 64; one row scale
  EXPECT_EQ(bytes_of(config), 8 * 4096 * (int8_row + int4_row) + 8 * 128 * (256 + 256));
}

TEST(ContiguousLayout, RefusesQueryHeadsThatDoNotShareTheKvHeadsEvenly) {
  ContiguousConfig config = config_of("f16");
  config.num_q_heads = 12;
  EXPECT_THAT(message_of(config), HasSubstr("num_q_heads is 12; expected a multiple of "));
}

TEST(ContiguousLayout, RefusesWhatNeedsBlocks) {
  EXPECT_THAT(message_of(config_of("nvfp4:sink=16,recent=64")),
              HasSubstr("has full-precision window"));
  EXPECT_THAT(message_of(config_of("int8:source=page")), HasSubstr("shares scales by page"));
  ContiguousConfig config = config_of("f16");
  config.overrides = {parse_layer_override("3=int8:source=page").value()};
  EXPECT_THAT(message_of(config), HasSubstr("shares scales by page"));
  config = config_of("f16");
  config.calibration.resize(32);
  config.calibration[7].k_block_offset.resize(8 * 128);
  EXPECT_THAT(message_of(config), HasSubstr("layer 7 k_block_offset"));
}

TEST(ContiguousLayout, NamesTheFieldThatDoesNotFit) {
  const auto message = [](auto change) {
    ContiguousConfig config = config_of("fp4_row");
    change(config);
    return message_of(config);
  };
  EXPECT_EQ(message([](auto&) {}), "accepted");
  EXPECT_THAT(message([](auto& c) { c.batch_size = 0; }), HasSubstr("batch_size is 0"));
  EXPECT_THAT(message([](auto& c) { c.max_seq_len = -1; }), HasSubstr("max_seq_len is -1"));
  EXPECT_THAT(message([](auto& c) { c.num_q_heads = 0; }), HasSubstr("num_q_heads is 0"));
  EXPECT_THAT(message([](auto& c) { c.max_append = 0; }), HasSubstr("max_append is 0"));
  EXPECT_THAT(message([](auto& c) { c.geometry.num_kv_heads = 0; }),
              HasSubstr("num_kv_heads is 0"));
  EXPECT_THAT(message([](auto& c) { c.geometry.v_head_dim = 0; }), HasSubstr("v_head_dim is 0"));
  EXPECT_THAT(message([](auto& c) { c.geometry.k_head_dim = 100; }),
              HasSubstr("head_dim is 100; fp4_row needs a multiple of 8"));
  EXPECT_THAT(message([](auto& c) { c.calibration.resize(3); }),
              HasSubstr("calibration has 3 layers"));
  EXPECT_THAT(message([](auto& c) {
                c.overflow = Overflow::kEvict;
                c.geometry.layer_windows.assign(32, 8);
              }),
              HasSubstr("overflow is evict"));
}

TEST(ContiguousLayout, RefusesMoreTokensOrBytesThanItCanCount) {
  ContiguousConfig config = config_of("f16");
  config.max_seq_len = kMaxContiguousTokens + 1;
  EXPECT_THAT(message_of(config), HasSubstr("at most 1048576"));
  config.max_seq_len = kMaxContiguousTokens;
  config.batch_size = std::numeric_limits<int>::max();
  config.geometry.num_kv_heads = config.num_q_heads = 1 << 14;
  EXPECT_THAT(message_of(config), HasSubstr("passes 2^63 bytes"));
}

}  // namespace
}  // namespace kvx::kv::contiguous_layout_test
