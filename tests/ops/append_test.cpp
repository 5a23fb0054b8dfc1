// append: slots, runs, bits that stay, transforms' positions, threads and memory.
#include "ops/append/append.hpp"

#include <gmock/gmock.h>

#include <limits>

#include "format/list.hpp"
#include "tests/support/allocation_counter.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::append_test {
namespace {

using namespace kvx::tests;  // NOLINT: builders
using format::FormatId;
using testing::HasSubstr;

const LayerShape kShape = {.num_blocks = 3, .block_size = 4, .num_heads = 2};

CpuContext best_context() {
  return serial_context(cpu_levels_here().back());
}

TestLayer int8_layer() {
  return {spec_named("int8"), spec_named("int8"), kShape};
}

TEST(Append, ASlotBeyondTheCacheIsAnErrorAndNothingIsWritten) {
  TestLayer layer = int8_layer();
  const std::vector<uint8_t> before = layer.k.codes;
  const auto report =
      append_rows(best_context(), layer, kShape, normal_rows(kShape, 3, 1), {0, 1, 12});
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().code, ErrorCode::kOutOfRange);
  EXPECT_THAT(report.error().message, HasSubstr("slot_mapping[2] is 12"));
  EXPECT_THAT(report.error().message, HasSubstr("12 slots"));
  EXPECT_TRUE(same_bytes(before, layer.k.codes));
}

TEST(Append, NegativeSlotsSkipTheirTokens) {
  TestLayer layer = int8_layer();
  TestLayer expected = int8_layer();
  const KvRows rows = normal_rows(kShape, 4, 1);
  const int64_t lowest = std::numeric_limits<int64_t>::min();
  const auto report = append_rows(best_context(), layer, kShape, rows, {-1, 5, lowest, 7});
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report.value().tokens_written, 2);
  for (const int t : {1, 3}) {
    const size_t k_row = size_t(kShape.num_heads) * kShape.k_dim;
    const KvRows one = {{rows.k.begin() + t * k_row, rows.k.begin() + (t + 1) * k_row},
                        {rows.v.begin() + t * k_row, rows.v.begin() + (t + 1) * k_row}};
    ASSERT_TRUE(append_rows(best_context(), expected, kShape, one, {4 + t}).ok());
  }
  EXPECT_TRUE(same_bytes(expected.k.codes, layer.k.codes));
  EXPECT_TRUE(same_bytes(expected.k.scales, layer.k.scales));
  EXPECT_TRUE(same_bytes(expected.v.codes, layer.v.codes));
}

TEST(Append, NoTokensIsNoWork) {
  TestLayer layer = int8_layer();
  const auto report = append_rows(best_context(), layer, kShape, {}, {});
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report.value().tokens_written, 0);
}

// Every 16-bit pattern, signalling NaNs included.
TEST(Append, InputOfTheCachesOwnTypeKeepsItsBits) {
  const LayerShape shape = {.num_blocks = 1, .block_size = 1024, .num_heads = 1};
  std::vector<uint16_t> input(1024 * 64);
  for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<uint16_t>(i);
  for (const auto& [name, type] : {std::pair("f16", DType::kF16), {"bf16", DType::kBF16}}) {
    TestLayer layer(spec_named(name), spec_named(name), shape);
    AppendArgs args;
    args.cache = layer.view();
    args.k = args.v = dense_rows(static_cast<const void*>(input.data()), type, 1, 64);
    const std::vector<int64_t> slots = slots_from(0, 1024);
    args.slot_mapping = slots;
    ASSERT_TRUE(append(best_context(), args).ok());
    const auto* bytes = reinterpret_cast<const uint8_t*>(input.data());
    EXPECT_TRUE(same_bytes({bytes, input.size() * 2}, layer.k.codes)) << name;
  }
}

TEST(Append, RowsWithStridesAreReadWhereTheyLie) {
  const KvRows rows = normal_rows(kShape, 4, 3);
  TestLayer expected = int8_layer();
  ASSERT_TRUE(append_rows(best_context(), expected, kShape, rows, slots_from(0, 4)).ok());

  // One fused tensor [token, K then V, head, dim], as engines hand it over.
  const int row = kShape.num_heads * kShape.k_dim;
  std::vector<float> fused(size_t(4) * 2 * row);
  for (int t = 0; t < 4; ++t) {
    std::copy_n(rows.k.begin() + t * row, row, fused.begin() + t * 2 * row);
    std::copy_n(rows.v.begin() + t * row, row, fused.begin() + t * 2 * row + row);
  }
  TestLayer layer = int8_layer();
  AppendArgs args;
  args.cache = layer.view();
  args.k = dense_rows(static_cast<const void*>(fused.data()), DType::kF32, 2, kShape.k_dim);
  args.v = dense_rows(static_cast<const void*>(fused.data() + row), DType::kF32, 2, kShape.v_dim);
  args.k.token_stride = args.v.token_stride = 2 * row;
  const std::vector<int64_t> slots = slots_from(0, 4);
  args.slot_mapping = slots;
  ASSERT_TRUE(append(best_context(), args).ok());
  EXPECT_TRUE(same_bytes(expected.k.codes, layer.k.codes));
  EXPECT_TRUE(same_bytes(expected.v.codes, layer.v.codes));
}

TEST(Append, AliasesAndSidesThatAreNotStoredAreLeftAlone) {
  TestLayer layer = int8_layer();
  layer.v.view.is_alias = true;
  const std::vector<uint8_t> v_before = layer.v.codes;
  ASSERT_TRUE(
      append_rows(best_context(), layer, kShape, normal_rows(kShape, 4, 1), slots_from(0, 4)).ok());
  EXPECT_TRUE(same_bytes(v_before, layer.v.codes));
  layer.v.view.is_alias = false;
  layer.v.view.head_dim = 0;
  ASSERT_TRUE(
      append_rows(best_context(), layer, kShape, normal_rows(kShape, 4, 1), slots_from(0, 4)).ok());
  EXPECT_TRUE(same_bytes(v_before, layer.v.codes));
}

TEST(Append, PositionsMustLieInsideTheBlockOffsetTable) {
  TestLayer layer = int8_layer();
  const std::vector<float> offsets(size_t(2) * kShape.num_heads * kShape.k_dim, 1.0f);
  const KvRows rows = normal_rows(kShape, 2, 1);
  AppendArgs args;
  args.cache = layer.view();
  args.k = args.v = dense_rows(rows.k.data(), DType::kF32, kShape.num_heads, kShape.k_dim);
  const std::vector<int64_t> slots = {0, 1};
  args.slot_mapping = slots;
  args.transform.k.block_offset = offsets.data();
  args.transform.k.num_offset_blocks = 2;
  const std::vector<uint8_t> before = layer.k.codes;

  const auto without = append(best_context(), args);
  ASSERT_FALSE(without.ok());
  EXPECT_THAT(without.error().message, HasSubstr("positions has 0 entries"));
  const std::vector<int64_t> beyond = {7, 8};
  args.positions = beyond;
  const auto outside = append(best_context(), args);
  ASSERT_FALSE(outside.ok());
  EXPECT_EQ(outside.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(outside.error().message, HasSubstr("positions[1] is 8"));
  EXPECT_TRUE(same_bytes(before, layer.k.codes));
  const std::vector<int64_t> inside = {6, 7};
  args.positions = inside;
  EXPECT_TRUE(append(best_context(), args).ok());
}

// Enough tokens for several tasks; slots in a random order with many duplicates.
struct ManyTokens {
  LayerShape shape = {.num_blocks = 9, .block_size = 16, .num_heads = 3};
  int num_tokens = 600;
  KvRows rows = normal_rows(shape, num_tokens, 5);
  std::vector<int64_t> slots;

  ManyTokens() {
    std::mt19937 generator(7);
    for (int t = 0; t < num_tokens; ++t) {
      // Runs of a few consecutive slots, at random places.
      const bool continues = t % 4 != 0 && slots.back() + 1 < 9 * 16;
      slots.push_back(continues ? slots.back() + 1 : static_cast<int64_t>(generator() % (9 * 16)));
    }
  }
};

std::vector<uint8_t> bytes_after_append(const CpuContext& context, const format::FormatSpec& spec,
                                        const ManyTokens& many) {
  TestLayer layer(spec, spec, many.shape);
  EXPECT_TRUE(append_rows(context, layer, many.shape, many.rows, many.slots).ok());
  std::vector<uint8_t> all = layer.k.codes;
  for (const auto* part : {&layer.k.scales, &layer.v.codes, &layer.v.scales}) {
    all.insert(all.end(), part->begin(), part->end());
  }
  return all;
}

TEST(Append, TheBytesDoNotDependOnTheNumberOfThreads) {
  const ManyTokens many;
  const auto* kernels = best_context().kernels;
  for (const format::Facts* facts : format::kRowFacts) {
    for (int s = 0; s < facts->scale_sources.count; ++s) {
      const format::ScaleSource source = facts->scale_sources.values[s];
      if (source == format::ScaleSource::kGiven) continue;
      const auto spec = format::make_spec(*facts, {.scale_source = source}).value();
      const auto expected = bytes_after_append({kernels, &serial_executor()}, spec, many);
      for (const int threads : {2, 5}) {
        const auto pool = make_thread_pool(threads);
        EXPECT_TRUE(same_bytes(expected, bytes_after_append({kernels, pool.get()}, spec, many)))
            << facts->name << " with " << threads << " threads";
      }
    }
  }
}

TEST(Append, TheLaterOfTwoTokensInOneSlotWins) {
  const ManyTokens many;
  const auto pool = make_thread_pool(4);
  TestLayer layer(spec_named("f32"), spec_named("f32"), many.shape);
  ASSERT_TRUE(
      append_rows({best_context().kernels, pool.get()}, layer, many.shape, many.rows, many.slots)
          .ok());
  for (int t = 0; t < many.num_tokens; ++t) {
    const auto later = std::find(many.slots.begin() + t + 1, many.slots.end(), many.slots[t]);
    if (later != many.slots.end()) continue;
    const auto* bytes = reinterpret_cast<const uint8_t*>(&many.rows.k[size_t(t) * 3 * 64]);
    ASSERT_TRUE(
        same_bytes({bytes, 64 * 4},
                   layer.k.codes_at(many.slots[t] / 16, static_cast<int>(many.slots[t] % 16), 0)));
  }
}

TEST(Append, AWarmCallAllocatesNothing) {
  const ManyTokens many;
  const auto pool = make_thread_pool(2);
  const CpuContext context = {best_context().kernels, pool.get()};
  for (const char* name : {"bf16", "int8", "nvfp4", "int4_affine"}) {
    TestLayer layer(spec_named(name), spec_named(name), many.shape);
    const std::vector<int64_t> one_slot = {5};
    // Twice: whichever thread takes a task first grows its scratch.
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(append_rows(context, layer, many.shape, many.rows, many.slots).ok());
    }
    const int64_t before = num_allocations();
    ASSERT_TRUE(append_rows(context, layer, many.shape, many.rows, many.slots).ok());
    ASSERT_TRUE(append_rows(context, layer, many.shape, many.rows, one_slot).ok());
    EXPECT_EQ(num_allocations() - before, 0) << name;
  }
}

}  // namespace
}  // namespace kvx::ops::append_test
