// plan_window: after any history, what attend reads is what was appended, and windows are as long
// as they are promised to be.
#include <gmock/gmock.h>

#include "tests/support/window_history.hpp"

namespace kvx::tests {
namespace {

using ops::WindowState;
using ops::WindowUnit;

// Returns how many blocks came back to the window.
int64_t run(const WindowHistoryOptions& options, int num_steps) {
  WindowHistory history(options);
  for (int step = 0; step < num_steps && !testing::Test::HasFailure(); ++step) {
    SCOPED_TRACE(step);
    history.begin_step();
    EXPECT_TRUE(ops::forget_window_blocks(history.args().state, history.forgotten()).ok());
    const Status status = ops::plan_window(history.args());
    EXPECT_TRUE(status.ok()) << status.error().message;
    history.end_step();
  }
  return history.num_reopened();
}

TEST(PlanWindow, WhatAttendReadsIsWhatWasAppendedAfterAnyHistory) {
  for (const WindowUnit unit : {WindowUnit::kRows, WindowUnit::kBlocks}) {
    for (unsigned seed = 1; seed <= 12; ++seed) {
      SCOPED_TRACE(seed);
      WindowHistoryOptions options{.unit = unit, .seed = seed};
      options.sink_tokens = seed % 3 == 0 ? 0 : 4 * (seed % 3);
      options.recent_tokens = seed % 4 * 5;
      run(options, 250);
      if (HasFailure()) return;
    }
  }
}

TEST(PlanWindow, TooFewWindowBlocksMakeWindowsShorterAndNothingWrong) {
  for (const WindowUnit unit : {WindowUnit::kRows, WindowUnit::kBlocks}) {
    for (const int64_t num_window_blocks : {1, 3, 7, 12}) {
      SCOPED_TRACE(num_window_blocks);
      run({.unit = unit, .num_window_blocks = num_window_blocks, .seed = 5}, 300);
      if (HasFailure()) return;
    }
  }
}

// Pages that store whole blocks alone, and window blocks for no more than the sequences of a step.
TEST(PlanWindow, ReopensBlocksThatHaveLostTheirCopyAndWritesPagesByWholeBlocks) {
  int64_t num_reopened = 0;
  for (unsigned seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(seed);
    WindowHistoryOptions options{
        .unit = WindowUnit::kBlocks, .max_sequences = 7, .seed = seed, .reopens = true};
    options.sink_tokens = seed % 3 == 0 ? 0 : 4 * (seed % 3);
    options.recent_tokens = seed % 4 * 5;
    const auto window =
        cache::make_full_precision_window(options.sink_tokens, options.recent_tokens, 4).value();
    options.num_window_blocks = 7 * (window.sink_blocks + window.recent_blocks + 1);
    num_reopened += run(options, 250);
    if (HasFailure()) return;
  }
  EXPECT_GT(num_reopened, 0);
}

// One sequence of blocks of 4: two sink tokens, 4 recent tokens, 8 window blocks.
struct OnePlan {
  OnePlan() {
    args.state = {16, 8, words.data()};
    args.window = {1, 2};
    args.block_size = 4;
    args.num_sequences = 1;
    args.block_table = {table.data(), 6};
    args.max_blocks_per_sequence = 6;
    args.seq_lens = &length;
    args.q_starts = starts.data();
    args.num_tokens = 24;
    args.ids = ids.data();
    args.num_sink_blocks = &sinks;
    args.first_recent_block = &recent;
    args.slots = slots.data();
    args.window_slots = window_slots.data();
  }
  void step(int32_t tokens_after, int32_t num_new) {
    length = tokens_after;
    starts[1] = num_new;
    const Status status = ops::plan_window(args);
    ASSERT_TRUE(status.ok()) << status.error().message;
  }

  std::vector<int32_t> words = std::vector<int32_t>(WindowState::num_words(16, 8));
  std::vector<int32_t> table = {9, 3, 12, 5, 1, 7};
  int32_t length = 0;
  std::vector<int32_t> starts = {0, 0};
  std::vector<int32_t> ids = std::vector<int32_t>(6);
  int32_t sinks = 0, recent = 0;
  std::vector<int64_t> slots = std::vector<int64_t>(24), window_slots = slots;
  ops::WindowPlanArgs args;
};

TEST(PlanWindow, PromptFillsSinksAndTheLastBlocksAlone) {
  OnePlan plan;
  plan.step(18, 18);
  EXPECT_EQ(plan.sinks, 1);
  EXPECT_EQ(plan.recent, 3);
  for (int t = 0; t < 18; ++t) {
    EXPECT_EQ(plan.slots[t], plan.table[t / 4] * 4 + t % 4);
    EXPECT_EQ(plan.window_slots[t] >= 0, t < 4 || t >= 12) << t;
  }
  EXPECT_EQ(plan.window_slots[18], -1);  // padding
  EXPECT_EQ(plan.ids[1], 3);             // a page
  EXPECT_EQ(plan.ids[3], plan.window_slots[12] / 4);
}

TEST(PlanWindow, CutInsideTheWindowLeavesItAsItWas) {
  OnePlan plan;
  plan.step(18, 18);
  const std::vector<int64_t> before = plan.window_slots;
  plan.step(15, 1);           // four tokens are gone, and another one comes
  EXPECT_EQ(plan.recent, 3);  // block 2 was never in the window
  EXPECT_EQ(plan.window_slots[0], before[14]);
  EXPECT_EQ(plan.ids[3], before[12] / 4);
}

TEST(PlanWindow, FollowsAPageIntoAnotherSequence) {
  OnePlan plan;
  plan.step(8, 8);
  const int32_t shared = plan.ids[0];
  plan.table = {9, 3, 14, 15, 2, 8};  // another sequence with the same first blocks
  plan.step(9, 1);
  EXPECT_EQ(plan.sinks, 1);
  EXPECT_EQ(plan.ids[0], shared);
  EXPECT_EQ(plan.recent, 1);
}

TEST(PlanWindow, ForgottenPageHasNoCopy) {
  OnePlan plan;
  plan.step(9, 9);
  ASSERT_TRUE(ops::forget_window_blocks(plan.args.state, std::vector<int64_t>{9, 3}).ok());
  plan.step(10, 1);
  EXPECT_EQ(plan.sinks, 0);
  EXPECT_EQ(plan.recent, 2);
  EXPECT_EQ(plan.ids[0], 9);
}

TEST(PlanWindow, RefusesWhatDoesNotFitAndWritesNothing) {
  OnePlan plan;
  plan.step(8, 8);
  const std::vector<int32_t> words = plan.words;
  const auto error_of = [&plan](int32_t length, int32_t num_new) {
    plan.length = length;
    plan.starts[1] = num_new;
    return ops::plan_window(plan.args).error().message;
  };
  EXPECT_THAT(error_of(3, 4), testing::HasSubstr("seq_lens[0] is 3"));
  EXPECT_THAT(error_of(25, 4), testing::HasSubstr("seq_lens[0] is 25"));
  EXPECT_THAT(error_of(24, 25), testing::HasSubstr("q_starts[0..1]"));
  plan.table[1] = 16;
  EXPECT_THAT(error_of(8, 1), testing::HasSubstr("block_table[0][1] is 16"));
  EXPECT_THAT(
      ops::forget_window_blocks(plan.args.state, std::vector<int64_t>{9, 16}).error().message,
      testing::HasSubstr("blocks[1] is 16"));
  EXPECT_EQ(plan.words, words);
}

TEST(PlanWindow, NamesWindowBlocksThatAreMissingWhereBlocksAreReopened) {
  OnePlan plan;
  std::vector<int64_t> ids(8);
  std::vector<int32_t> tokens(8);
  plan.args.unit = WindowUnit::kBlocks;
  plan.args.closing_from = plan.args.closing_to = plan.args.evicted_from = plan.args.evicted_to =
      plan.args.reopened_from = plan.args.reopened_to = ids.data();
  plan.args.closing_tokens = plan.args.evicted_tokens = plan.args.reopened_tokens = tokens.data();
  plan.args.state.num_window_blocks = 3;
  plan.length = plan.starts[1] = 9;
  EXPECT_THAT(ops::plan_window(plan.args).error().message,
              testing::HasSubstr("num_window_blocks is 3; 1 sequences whose blocks are reopened "
                                 "need 4"));
  plan.length = plan.starts[1] = 0;
  EXPECT_TRUE(ops::plan_window(plan.args).ok());  // of padding
}

TEST(PlanWindow, AnyStateIsHarmless) {
  std::mt19937 rng(3);
  for (int round = 0; round < 400; ++round) {
    OnePlan plan;
    plan.args.unit = WindowUnit::kBlocks;
    std::vector<int64_t> from(8), to(8), evicted_from(8), evicted_to(8);
    std::vector<int32_t> tokens(8), evicted_tokens(8);
    int64_t reopened_from = 0, reopened_to = 0;
    int32_t reopened_tokens = 0;
    plan.args.closing_from = from.data();
    plan.args.closing_to = to.data();
    plan.args.closing_tokens = tokens.data();
    if (round % 2 == 1) {
      plan.args.evicted_from = evicted_from.data();
      plan.args.evicted_to = evicted_to.data();
      plan.args.evicted_tokens = evicted_tokens.data();
      plan.args.reopened_from = &reopened_from;
      plan.args.reopened_to = &reopened_to;
      plan.args.reopened_tokens = &reopened_tokens;
    }
    for (int32_t& word : plan.words) word = static_cast<int32_t>(rng() >> (rng() % 32));
    plan.step(18, 7);
    for (const int64_t slot : plan.window_slots) EXPECT_LT(slot, 8 * 4);
    for (size_t i = 0; i < tokens.size(); ++i) {
      EXPECT_TRUE(from[i] >= 0 && from[i] < 8 && to[i] >= 0 && to[i] < 16);
      EXPECT_TRUE(evicted_from[i] >= 0 && evicted_from[i] < 8);
      EXPECT_TRUE(evicted_to[i] >= 0 && evicted_to[i] < 16);
      EXPECT_TRUE(evicted_tokens[i] >= 0 && evicted_tokens[i] <= 4);
    }
    EXPECT_TRUE(reopened_from >= 0 && reopened_from < 16 && reopened_to >= 0 && reopened_to < 8);
    EXPECT_TRUE(reopened_tokens >= 0 && reopened_tokens < 4);
  }
}

}  // namespace
}  // namespace kvx::tests
