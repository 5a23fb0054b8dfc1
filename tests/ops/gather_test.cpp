// gather: ranges, output types, what it refuses, and threads.
#include "ops/gather/gather.hpp"

#include <gmock/gmock.h>

#include "core/float16.hpp"
#include "format/list.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::gather_test {
namespace {

using namespace kvx::tests;  // NOLINT: builders
using testing::HasSubstr;

const LayerShape kShape = {.num_blocks = 4, .block_size = 4, .num_heads = 2};

CpuContext best_context() {
  return serial_context(cpu_levels_here().back());
}

// f32 rows in slots 0..15, so that gathered numbers are known exactly.
struct FilledCache {
  TestLayer layer{spec_named("f32"), spec_named("f32"), kShape};
  KvRows rows = normal_rows(kShape, 16, 1);
  std::vector<int32_t> ids = {2, 0, 3, 1};  // of sequence 0 in its first row, 1 in its second
  std::vector<float> k = std::vector<float>(16 * 128, -7.0f);
  std::vector<float> v = std::vector<float>(16 * 128, -7.0f);

  FilledCache() {
    EXPECT_TRUE(append_rows(best_context(), layer, kShape, rows, slots_from(0, 16)).ok());
  }

  GatherArgs args(std::span<const GatherRange> ranges) {
    GatherArgs args;
    args.cache = layer.view();
    args.block_table = {ids.data(), 2};
    args.max_blocks_per_sequence = 2;
    args.num_sequences = 2;
    args.ranges = ranges;
    args.k = dense_rows(k.data(), DType::kF32, 2, 64);
    args.v = dense_rows(v.data(), DType::kF32, 2, 64);
    return args;
  }
  // Row `row` of the output holds what slot `slot` was given.
  void expect_row(int row, int slot) const {
    for (int i = 0; i < 128; ++i) {
      ASSERT_EQ(k[row * 128 + i], rows.k[slot * 128 + i]) << "row " << row << " element " << i;
      ASSERT_EQ(v[row * 128 + i], rows.v[slot * 128 + i]) << "row " << row << " element " << i;
    }
  }
};

TEST(Gather, RangesFollowTheBlockTable) {
  FilledCache cache;
  const GatherRange ranges[] = {{0, 2, 4, 1}, {1, 7, 1, 0}};
  ASSERT_TRUE(gather(best_context(), cache.args(ranges)).ok());
  cache.expect_row(0, 1 * 4 + 3);  // sequence 1, token 7: its second block is 1
  cache.expect_row(1, 2 * 4 + 2);
  cache.expect_row(2, 2 * 4 + 3);
  cache.expect_row(3, 0);
  cache.expect_row(4, 1);
  EXPECT_EQ(cache.k[5 * 128], -7.0f) << "rows outside the ranges are left alone";
}

TEST(Gather, EveryOutputTypeIsTheRoundedNumber) {
  FilledCache cache;
  const GatherRange range[] = {{0, 0, 4, 0}};
  for (const DType type : {DType::kF16, DType::kBF16}) {
    std::vector<uint16_t> out(4 * 128);
    GatherArgs args = cache.args(range);
    args.v.data = nullptr;
    args.k = dense_rows(static_cast<void*>(out.data()), type, 2, 64);
    ASSERT_TRUE(gather(best_context(), args).ok());
    for (int i = 0; i < 4 * 128; ++i) {
      const float x = cache.rows.k[8 * 128 + i];
      ASSERT_EQ(out[i], type == DType::kF16 ? f32_to_f16(x) : f32_to_bf16(x)) << i;
    }
  }
  EXPECT_EQ(cache.v[0], -7.0f) << "a side without data is not wanted";
}

void expect_refused(FilledCache& cache, const GatherRange& range, const std::string& message) {
  const Status status = gather(best_context(), cache.args({&range, 1}));
  ASSERT_FALSE(status.ok()) << message;
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  EXPECT_THAT(status.error().message, HasSubstr(message));
  EXPECT_EQ(cache.k[0], -7.0f);
}

TEST(Gather, ARangeOutsideItsTableIsAnErrorAndNothingIsWritten) {
  FilledCache cache;
  expect_refused(cache, {.num_tokens = 9}, "ranges[0] is 9 tokens from 0");
  expect_refused(cache, {.first_token = 8, .num_tokens = 1}, "covers 8");
  expect_refused(cache, {.first_token = -1, .num_tokens = 1}, "from -1");
  expect_refused(cache, {.first_token = 1, .num_tokens = INT64_MAX}, "ranges[0]");
  expect_refused(cache, {.sequence = 2, .num_tokens = 1}, "sequence is 2");
}

TEST(Gather, ABlockIdOutsideTheCacheIsAnErrorAndNothingIsWritten) {
  FilledCache cache;
  cache.ids = {2, -1, 4, 1};
  expect_refused(cache, {.num_tokens = 5}, "block 1 of sequence 0 is -1");
  expect_refused(cache, {.sequence = 1, .num_tokens = 1}, "block 0 of sequence 1 is 4");
  const GatherRange unread[] = {{0, 0, 4, 0}};
  EXPECT_TRUE(gather(best_context(), cache.args(unread)).ok())
      << "ids beyond the range are not read";
}

TEST(Gather, TheNumbersDoNotDependOnTheNumberOfThreads) {
  const LayerShape shape = {.num_blocks = 40, .block_size = 16, .num_heads = 3};
  const auto pool = make_thread_pool(4);
  const CpuContext threaded = {best_context().kernels, pool.get()};
  for (const format::Facts* facts : format::kRowFacts) {
    TestLayer layer(computed_spec(*facts), computed_spec(*facts), shape);
    const KvRows rows = normal_rows(shape, 640, 3);
    ASSERT_TRUE(append_rows(best_context(), layer, shape, rows, slots_from(0, 640)).ok());
    const KvRows one = gather_slots(best_context(), layer, shape, 640);
    const KvRows many = gather_slots(threaded, layer, shape, 640);
    EXPECT_EQ(one.k, many.k) << facts->name;
    EXPECT_EQ(one.v, many.v) << facts->name;
  }
}

}  // namespace
}  // namespace kvx::ops::gather_test
