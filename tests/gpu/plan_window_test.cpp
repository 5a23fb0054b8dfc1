// plan_window on a GPU: after any history the CPU's state and lists, and attention with a window
// that a plan made.
#include "tests/gpu/device_layer.hpp"
#include "tests/support/window_history.hpp"

namespace kvx::tests {
namespace {

using ops::WindowUnit;

class GpuWindow : public GpuTest {
 protected:
  // Plans the history's next step on the device, from the state that the host's plan began with.
  void plan_on_device(WindowHistory& history, uint64_t expected_errors) {
    Mirror mirror(memory());
    DeferredErrors counters(memory());
    history.for_each_array([&](auto& array) { mirror.add(array); });
    std::vector<int64_t>& forgotten = history.forgotten();
    mirror.add(forgotten);
    ops::WindowPlanArgs args = history.args();
    args.state.words = mirror.at(args.state.words);
    for (auto** list :
         {&args.slots, &args.window_slots, &args.closing_from, &args.closing_to, &args.evicted_from,
          &args.evicted_to, &args.reopened_from, &args.reopened_to}) {
      if (*list != nullptr) *list = mirror.at(*list);
    }
    for (auto** list : {&args.ids, &args.num_sink_blocks, &args.first_recent_block,
                        &args.closing_tokens, &args.evicted_tokens, &args.reopened_tokens}) {
      if (*list != nullptr) *list = mirror.at(*list);
    }
    args.block_table.ids = mirror.at(args.block_table.ids);
    args.seq_lens = mirror.at(args.seq_lens);
    args.q_starts = mirror.at(args.q_starts);
    const std::span<const int64_t> blocks(forgotten.empty() ? nullptr : mirror.at(forgotten.data()),
                                          forgotten.size());
    ASSERT_TRUE(ops::forget_window_blocks(context(), args.state, blocks, counters.get()).ok());
    ASSERT_TRUE(ops::plan_window(context(), args, counters.get()).ok());
    synchronize();
    history.for_each_array([&](auto& array) { mirror.fetch(array); });
    EXPECT_EQ(counters.read().out_of_range, expected_errors);
  }
};

TEST_F(GpuWindow, PlansWhatTheHostPlansAfterAnyHistory) {
  for (const bool reopens : {false, true}) {
    for (const auto& [unit, num_window_blocks] : {std::pair{WindowUnit::kRows, 3},
                                                  {WindowUnit::kRows, 64},
                                                  {WindowUnit::kBlocks, 3},
                                                  {WindowUnit::kBlocks, 25},
                                                  {WindowUnit::kBlocks, 64}}) {
      if (reopens && (unit == WindowUnit::kRows || num_window_blocks < 25)) continue;
      const WindowHistoryOptions options{
          .unit = unit, .num_window_blocks = num_window_blocks, .seed = 4, .reopens = reopens};
      WindowHistory on_host(options), on_device(options);
      for (int step = 0; step < 60; ++step) {
        SCOPED_TRACE(step);
        for (WindowHistory* history : {&on_host, &on_device}) history->begin_step();
        ASSERT_TRUE(ops::forget_window_blocks(on_host.args().state, on_host.forgotten()).ok());
        ASSERT_TRUE(ops::plan_window(on_host.args()).ok());
        if (on_device.args().num_sequences == 0) {
          ASSERT_TRUE(ops::plan_window(on_device.args()).ok());
        } else {
          ASSERT_NO_FATAL_FAILURE(plan_on_device(on_device, 0));
        }
        ASSERT_NO_FATAL_FAILURE(on_device.end_step());
        on_host.end_step();
        ASSERT_EQ(on_device.written(), on_host.written());
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(GpuWindow, CountsWhatDoesNotFitAndGivesItNoWindow) {
  WindowHistory history({.max_sequences = 1, .seed = 2});
  do {
    history.begin_step();
  } while (history.args().num_sequences == 0 || history.args().seq_lens[0] < 9);
  const_cast<int32_t*>(history.args().seq_lens)[0] = 1'000'000;  // the history's own array
  ASSERT_NO_FATAL_FAILURE(plan_on_device(history, 1));
  EXPECT_EQ(history.args().num_sink_blocks[0], 0);
  EXPECT_EQ(history.args().first_recent_block[0], WindowHistory::kMaxBlocks);
  for (int64_t i = 0; i < history.args().num_tokens; ++i) {
    EXPECT_EQ(history.args().window_slots[i], -1);
    EXPECT_EQ(history.args().slots[i], -1);
  }
}

}  // namespace
}  // namespace kvx::tests
