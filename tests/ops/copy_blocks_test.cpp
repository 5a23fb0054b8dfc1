// copy_blocks: as stored where both sides store alike, converted where not, in order, or refused.
#include "ops/copy_blocks/copy_blocks.hpp"

#include <gmock/gmock.h>

#include "format/list.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::copy_blocks_test {
namespace {

using namespace kvx::tests;  // NOLINT: builders
using format::ScaleSource;
using testing::HasSubstr;

const LayerShape kShape = {.num_blocks = 3, .block_size = 4, .num_heads = 2};
const LayerShape kHnd = {.num_blocks = 3, .block_size = 4, .num_heads = 2, .order = Order::kHnd};

CpuContext best_context() {
  return serial_context(cpu_levels_here().back());
}

void fill(TestLayer& layer, uint32_t seed) {
  ASSERT_TRUE(
      append_rows(best_context(), layer, kShape, normal_rows(kShape, 12, seed), slots_from(0, 12))
          .ok());
}

// Rows and scales of the first tokens are the source's; everything else is as before.
TEST(CopyBlocks, CopiesRowsAndScalesBetweenOrdersAsStored) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (int s = 0; s < facts->scale_sources.count; ++s) {
      const ScaleSource source = facts->scale_sources.values[s];
      if (source == ScaleSource::kGiven) continue;
      const auto spec = format::make_spec(*facts, {.scale_source = source}).value();
      TestLayer from(spec, spec, kShape);
      TestLayer to(spec, spec, kHnd);
      fill(from, 1);
      const BlockCopy copy = {.from_block = 2, .to_block = 1, .num_tokens = 3};
      ASSERT_TRUE(copy_blocks(best_context(), from.view(), to.view(), {&copy, 1}).ok());
      for (int head = 0; head < 2; ++head) {
        for (int t = 0; t < 3; ++t) {
          EXPECT_TRUE(same_bytes(from.k.codes_at(2, t, head), to.k.codes_at(1, t, head)));
          EXPECT_TRUE(same_bytes(from.v.scales_at(2, t, head), to.v.scales_at(1, t, head)))
              << facts->name << " token " << t << " head " << head;
        }
        for (const uint8_t byte : to.k.codes_at(1, 3, head)) ASSERT_EQ(byte, 0xCC);
        for (const uint8_t byte : to.k.codes_at(2, 0, head)) ASSERT_EQ(byte, 0xCC);
      }
    }
  }
}

// What leaves a 16-bit window: the target's bytes are those of an append of the same numbers.
TEST(CopyBlocks, ConvertsAsAnAppendWould) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (int s = 0; s < facts->scale_sources.count; ++s) {
      const auto spec =
          format::make_spec(*facts, {.scale_source = facts->scale_sources.values[s]}).value();
      TestLayer full_precision(spec_named("bf16"), spec_named("bf16"), kShape);
      TestLayer packed(spec, spec, kHnd);
      TestLayer expected(spec, spec, kHnd);
      fill(full_precision, 2);
      for (TestLayer* layer : {&packed, &expected}) {
        layer->k.fill_scales(format::round_scale(spec.scale_type, 0.5f));
        layer->v.fill_scales(format::round_scale(spec.scale_type, 0.5f));
        if (spec.scale_type != format::ScaleType::kE8M0) continue;
        layer->k.fill_scales({126});
        layer->v.fill_scales({126});
      }
      const BlockCopy copies[] = {{0, 0, 4}, {1, 1, 4}};
      ASSERT_TRUE(copy_blocks(best_context(), full_precision.view(), packed.view(), copies).ok());
      const KvRows rows = gather_slots(best_context(), full_precision, kShape, 8);
      ASSERT_TRUE(append_rows(best_context(), expected, kShape, rows, slots_from(0, 8)).ok());
      EXPECT_TRUE(same_bytes(expected.k.codes, packed.k.codes)) << facts->name;
      EXPECT_TRUE(same_bytes(expected.k.scales, packed.k.scales)) << facts->name;
      EXPECT_TRUE(same_bytes(expected.v.codes, packed.v.codes)) << facts->name;
    }
  }
}

TEST(CopyBlocks, GivenScalesThatDifferMakeItConvertAndStayAsTheyAre) {
  const auto spec = spec_named("fp8_e4m3");
  TestLayer from(spec, spec, kShape);
  TestLayer to(spec, spec, kShape);
  from.k.fill_scales({std::bit_cast<uint32_t>(0.5f)});
  to.k.fill_scales({std::bit_cast<uint32_t>(0.25f)});
  from.v.fill_scales({std::bit_cast<uint32_t>(0.5f)});
  to.v.fill_scales({std::bit_cast<uint32_t>(0.5f)});
  fill(from, 3);
  const auto scales = to.k.scales;
  const BlockCopy copy = {.from_block = 0, .to_block = 0, .num_tokens = 4};
  ASSERT_TRUE(copy_blocks(best_context(), from.view(), to.view(), {&copy, 1}).ok());
  EXPECT_TRUE(same_bytes(scales, to.k.scales));
  EXPECT_NE(from.k.codes_at(0, 0, 0), to.k.codes_at(0, 0, 0));
  EXPECT_TRUE(same_bytes(from.v.codes_at(0, 0, 0), to.v.codes_at(0, 0, 0)));
  const KvRows was = gather_slots(best_context(), from, kShape, 4);
  const KvRows is = gather_slots(best_context(), to, kShape, 4);
  for (size_t i = 0; i < was.k.size(); ++i) EXPECT_NEAR(was.k[i], is.k[i], 0.13f) << i;
}

TEST(CopyBlocks, TensorScalesThatDifferMakeItConvert) {
  const auto spec = spec_named("nvfp4");
  const float small[] = {0.01f, 0.02f};
  const float large[] = {0.01f, 0.08f};
  TestLayer from(spec, spec, kShape);
  TestLayer to(spec, spec, kShape);
  from.k.view.tensor_scales = small;
  to.k.view.tensor_scales = large;
  fill(from, 4);
  const BlockCopy copy = {.from_block = 0, .to_block = 0, .num_tokens = 4};
  ASSERT_TRUE(copy_blocks(best_context(), from.view(), to.view(), {&copy, 1}).ok());
  EXPECT_TRUE(same_bytes(from.k.scales_at(0, 0, 0), to.k.scales_at(0, 0, 0)));
  EXPECT_NE(from.k.scales_at(0, 0, 1), to.k.scales_at(0, 0, 1));
}

TEST(CopyBlocks, TakesCopiesInOrder) {
  TestLayer layer(spec_named("int8"), spec_named("int8"), kShape);
  fill(layer, 5);
  const auto first = layer.k.codes_at(0, 1, 1);
  const BlockCopy copies[] = {{0, 1, 4}, {1, 2, 4}};
  ASSERT_TRUE(copy_blocks(best_context(), layer.view(), layer.view(), copies).ok());
  EXPECT_TRUE(same_bytes(first, layer.k.codes_at(2, 1, 1)));
}

TEST(CopyBlocks, CountsWhatTheTargetsCodesCannotSay) {
  TestLayer full_precision(spec_named("bf16"), spec_named("bf16"), kShape);
  const auto spec = spec_named("int8", {.scale_source = ScaleSource::kPageShared});
  TestLayer packed(spec, spec, kShape);
  KvRows rows = normal_rows(kShape, 4, 1);
  rows.k[3] = rows.v[70] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(append_rows(best_context(), full_precision, kShape, rows, slots_from(0, 4)).ok());
  const BlockCopy copy = {.from_block = 0, .to_block = 0, .num_tokens = 4};
  EXPECT_EQ(copy_blocks(best_context(), full_precision.view(), packed.view(), {&copy, 1}).value(),
            2);
}

TEST(CopyBlocks, RefusesBlocksAndShapesThatDoNotFitAndWritesNothing) {
  TestLayer from(spec_named("int8"), spec_named("int8"), kShape);
  TestLayer to(spec_named("int8"), spec_named("int8"), kShape);
  fill(from, 1);
  const auto before = to.k.codes;
  const auto refuse = [&](TestLayer& target, const BlockCopy& bad, const std::string& message) {
    const BlockCopy copies[] = {{0, 0, 4}, bad};
    const auto result = copy_blocks(best_context(), from.view(), target.view(), copies);
    ASSERT_FALSE(result.ok()) << message;
    EXPECT_THAT(result.error().message, HasSubstr(message));
    EXPECT_TRUE(same_bytes(before, to.k.codes));
  };
  refuse(to, {3, 0, 1}, "copies[1].from_block is 3");
  refuse(to, {0, -1, 1}, "copies[1].to_block is -1");
  refuse(to, {0, 0, 5}, "copies[1].num_tokens is 5");
  const LayerShape other_dim = {.num_blocks = 3, .block_size = 4, .num_heads = 2, .v_dim = 128};
  TestLayer wider(spec_named("int8"), spec_named("int8"), other_dim);
  refuse(wider, {0, 0, 1}, "v head_dim is 64 in from and 128 in to");
  const LayerShape other_block = {.num_blocks = 3, .block_size = 8, .num_heads = 2};
  TestLayer longer(spec_named("int8"), spec_named("int8"), other_block);
  refuse(longer, {0, 0, 1}, "block_size is 4 in from and 8 in to");
}

}  // namespace
}  // namespace kvx::ops::copy_blocks_test
