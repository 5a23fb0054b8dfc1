// What attend refuses: each error names the field, its value and what was expected, and nothing is
// written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "ops/attend/attend_cuda.hpp"
#include "tests/support/attend_scene.hpp"

namespace kvx::tests::check_test {
namespace {

using ops::AttendArgs;
using testing::HasSubstr;

SceneOptions two_sequences() {
  SceneOptions options;
  options.seq_lens = {37, 20};
  options.q_lens = {3, 1};
  options.k_offset = true;
  options.full_precision_format = "bf16";
  return options;
}

// Runs the scene with one change and expects an error that says all of `words`.
void expect_refused(const std::function<void(AttendArgs&)>& change, ErrorCode code,
                    const std::vector<std::string>& words) {
  AttendScene scene(two_sequences());
  scene.run(CpuLevel::kScalar);
  const std::vector<uint8_t> out = scene.out_bytes();
  const std::vector<float> lse = scene.lse();
  // Another scale: a work tile that runs in spite of the error would write other bytes.
  scene.args().softmax_scale = 0.5f;
  change(scene.args());
  const Status status = scene.attend(CpuLevel::kScalar);
  ASSERT_FALSE(status.ok()) << words.front();
  EXPECT_EQ(status.error().code, code);
  for (const std::string& word : words) EXPECT_THAT(status.error().message, HasSubstr(word));
  EXPECT_EQ(out, scene.out_bytes());
  EXPECT_EQ(lse, scene.lse());
}

void expect_invalid(const std::function<void(AttendArgs&)>& change,
                    const std::vector<std::string>& words) {
  expect_refused(change, ErrorCode::kInvalidArgument, words);
}
void expect_out_of_range(const std::function<void(AttendArgs&)>& change,
                         const std::vector<std::string>& words) {
  expect_refused(change, ErrorCode::kOutOfRange, words);
}

TEST(AttendChecks, HeadsThatDoNotDivide) {
  expect_invalid([](AttendArgs& a) { a.num_q_heads = 5; }, {"num_q_heads is 5", "num_kv_heads 2"});
  expect_invalid([](AttendArgs& a) { a.num_q_heads = 0; }, {"num_q_heads is 0"});
  expect_invalid([](AttendArgs& a) { a.num_q_heads = -2; }, {"num_q_heads is -2"});
}

TEST(AttendChecks, NumbersThatCannotBe) {
  const float nan = std::nanf("");
  const float infinity = std::numeric_limits<float>::infinity();
  expect_invalid([=](AttendArgs& a) { a.softmax_scale = nan; }, {"softmax_scale is nan", "finite"});
  expect_invalid([=](AttendArgs& a) { a.softmax_scale = infinity; }, {"softmax_scale is inf"});
  expect_invalid([=](AttendArgs& a) { a.softcap = nan; }, {"softcap is nan", "finite"});
  expect_invalid([](AttendArgs& a) { a.softcap = -1; }, {"softcap is -1", "positive"});
  expect_invalid([](AttendArgs& a) { a.window = -1; }, {"window is -1", "expected 0"});
  expect_invalid([](AttendArgs& a) { a.window_sinks = 1; }, {"window_sinks is 1", "window of 0"});
  expect_invalid([](AttendArgs& a) { a.num_sequences = -1; }, {"num_sequences is -1"});
  expect_invalid([](AttendArgs& a) { a.max_blocks_per_sequence = -1; },
                 {"max_blocks_per_sequence is -1"});
}

TEST(AttendChecks, NullPointers) {
  expect_invalid([](AttendArgs& a) { a.seq_lens = nullptr; }, {"seq_lens is null"});
  expect_invalid([](AttendArgs& a) { a.q_starts = nullptr; }, {"q_starts is null"});
  expect_invalid([](AttendArgs& a) { a.block_table.ids = nullptr; }, {"block_table is null"});
  expect_invalid([](AttendArgs& a) { a.q.data = nullptr; }, {"q is null"});
  expect_invalid([](AttendArgs& a) { a.out.data = nullptr; }, {"out is null"});
  expect_invalid([](AttendArgs& a) { a.first_recent_block = nullptr; },
                 {"first_recent_block is null"});
  expect_invalid([](AttendArgs& a) { a.num_sink_blocks = nullptr; }, {"num_sink_blocks is null"});
}

TEST(AttendChecks, LengthsThatDoNotFit) {
  const int32_t falling[] = {0, 3, 2};
  const int32_t negative[] = {-1, 3, 4};
  const int32_t many_new[] = {0, 3, 30};
  const int32_t too_long[] = {37, 49};
  const int32_t below_zero[] = {37, -1};
  expect_invalid([&](AttendArgs& a) { a.q_starts = falling; }, {"q_starts[1..2] is 3, 2"});
  expect_invalid([&](AttendArgs& a) { a.q_starts = negative; }, {"q_starts[0..1] is -1, 3"});
  expect_invalid([&](AttendArgs& a) { a.q_starts = many_new; }, {"seq_lens[1] is 20", "27"});
  expect_invalid([&](AttendArgs& a) { a.seq_lens = below_zero; }, {"seq_lens[1] is -1"});
  expect_out_of_range([&](AttendArgs& a) { a.seq_lens = too_long; },
                      {"seq_lens[1] is 49", "3 blocks of 16"});
  expect_out_of_range([](AttendArgs& a) { a.transform.k.num_offset_blocks = 2; },
                      {"seq_lens[0] is 37", "block_offset has 2"});
}

TEST(AttendChecks, BlockIdsOutsideTheirPool) {
  // Of sequence 0: block 0 is full-precision, block 1 (of 3) lies in both tails' reach.
  std::vector<int32_t> table;
  const auto with = [&table](int index, int32_t id) {
    return [&table, index, id](AttendArgs& a) {
      table.assign(a.block_table.ids, a.block_table.ids + 6);
      table[index] = id;
      a.block_table.ids = table.data();
    };
  };
  expect_out_of_range(with(0, 9), {"block_table[0][0] is 9", "full_precision", "[0, 9)"});
  expect_out_of_range(with(4, -1), {"block_table[1][1] is -1", "[0, 9)"});
  // Sequence 1 has two blocks; its third entry is never read.
  AttendScene scene(two_sequences());
  with(5, 1000)(scene.args());
  EXPECT_TRUE(scene.attend(CpuLevel::kScalar).ok());
}

TEST(AttendChecks, CachesThatAttentionCannotRead) {
  std::vector<ops::HeadRun> runs;
  const auto with_run = [&runs](const std::function<void(ops::HeadRun&)>& change) {
    return [&runs, change](AttendArgs& a) {
      runs.assign(a.packed.runs.begin(), a.packed.runs.end());
      change(runs[0]);
      a.packed.runs = runs;
    };
  };
  expect_invalid(with_run([](ops::HeadRun& r) { r.v.head_dim = 0; }), {"packed.v.head_dim is 0"});
  expect_invalid(with_run([](ops::HeadRun& r) { r.k.head_dim = 2000; }),
                 {"packed.k.head_dim is 2000", "1024"});
  expect_invalid(with_run([](ops::HeadRun& r) { r.k.codes.base = nullptr; }),
                 {"packed.k.codes is null"});
  expect_invalid([](AttendArgs& a) { a.full_precision.block_size = 8; },
                 {"full_precision has block_size 8", "packed's 16"});
}

TEST(AttendChecks, ATreeMaskNarrowerThanTheNewTokens) {
  const std::vector<uint8_t> mask(100, 1);
  expect_invalid(
      [&](AttendArgs& a) {
        a.tree_mask = mask.data();
        a.tree_mask_stride = 2;
      },
      {"tree_mask_stride is 2", "3 new tokens"});
}

TEST(AttendChecks, AnEmptyBatchIsNothingToDo) {
  AttendScene scene(two_sequences());
  scene.args().num_sequences = 0;
  scene.args().q.data = nullptr;
  EXPECT_TRUE(scene.attend(CpuLevel::kScalar).ok());
}

// What is known of a call on a GPU before anything there is looked at.
TEST(AttendChecks, OnAGpuNeedNoLookAtLengths) {
  const auto error_of = [](const std::function<void(AttendArgs&, ops::CudaAttendLimits&)>& change) {
    AttendScene scene(two_sequences());
    AttendArgs args = scene.args();
    ops::CudaAttendLimits limits{.max_q_len = 3, .total_q = 4};
    const Status fits = ops::check_attend(args, limits);
    EXPECT_TRUE(fits.ok()) << fits.error().message;
    change(args, limits);
    const Status status = ops::check_attend(args, limits);
    EXPECT_FALSE(status.ok());
    return status.ok() ? "" : status.error().message;
  };
  // A multiple of the KV heads: workspaces are divided by it.
  EXPECT_THAT(error_of([](auto& a, auto&) { a.num_q_heads = 1; }), HasSubstr("num_q_heads is 1"));
  EXPECT_THAT(error_of([](auto& a, auto&) { a.full_precision.block_size = 8; }),
              HasSubstr("full_precision has block_size 8"));
  EXPECT_THAT(error_of([](auto& a, auto&) { a.full_precision.num_kv_heads = 1; }),
              HasSubstr("1 KV heads"));
  const uint8_t mask[64] = {};
  for (const int64_t stride : {0, -8, 2}) {
    EXPECT_THAT(error_of([&](auto& a, auto&) {
                  a.tree_mask = mask;
                  a.tree_mask_stride = stride;
                }),
                HasSubstr("expected at least max_q_len, 3"));
  }
  EXPECT_THAT(error_of([](auto&, auto& limits) { limits.max_q_len = 0; }),
              HasSubstr("max_q_len is 0"));
  EXPECT_THAT(error_of([](auto&, auto& limits) { limits.max_q_len = INT32_MAX; }),
              HasSubstr("max_q_len is 2147483647"));
  EXPECT_THAT(error_of([](auto&, auto& limits) { limits.total_q = INT32_MAX; }),
              HasSubstr("total_q 2147483647"));
  EXPECT_THAT(error_of([](auto&, auto& limits) { limits.total_q = -1; }), HasSubstr("total_q -1"));
  EXPECT_THAT(error_of([](auto& a, auto&) { a.num_sequences = 65536; }),
              HasSubstr("num_sequences is 65536"));
  EXPECT_THAT(error_of([](auto&, auto& limits) { limits.num_decodes = -1; }),
              HasSubstr("num_decodes is -1; expected 0 to num_sequences, 2"));
  EXPECT_THAT(error_of([](auto&, auto& limits) { limits.num_decodes = 3; }),
              HasSubstr("num_decodes is 3"));
}

// Engines pad q and out to sizes for which they have captured graphs.
TEST(AttendChecks, OnAGpuAcceptRowsThatNoSequenceHas) {
  AttendScene scene(two_sequences());
  const ops::CudaAttendLimits limits{.max_q_len = 3, .total_q = 512, .num_decodes = 1};
  const Status status = ops::check_attend(scene.args(), limits);
  EXPECT_TRUE(status.ok()) << status.error().message;
}

}  // namespace
}  // namespace kvx::tests::check_test
