// A full-precision window beside a caller's pages: plan, append, copy_blocks and attend together,
// and what the plan refuses.
#include <gmock/gmock.h>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::window_test {
namespace {

using testing::HasSubstr;

constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;
constexpr int64_t kWindowBlocks = 8;

// One sequence whose tokens come in steps; pages of INT4, the window in F32.
class Windowed {
 public:
  explicit Windowed(uint32_t unit, kvx_format_t format = KVX_FORMAT_INT4)
      : pages(geometry, in_page(format), in_page(format)),
        copies({kWindowBlocks, 8, 2, 32}, in_page(KVX_FORMAT_F32), in_page(KVX_FORMAT_F32)) {
    window.block_size = 8;
    window.sink_tokens = 8;
    window.recent_tokens = 8;
    window.unit = unit;
    window.memory = KVX_MEMORY_HOST;
    window.num_blocks = geometry.num_blocks;
    window.num_window_blocks = kWindowBlocks;
    EXPECT_EQ(kvx_window_sizes(&window, &sizes), KVX_STATUS_OK) << kvx_last_error();
    state.resize(sizes.state_bytes / 4);
    window.state = state.data();
    window.state_bytes = sizes.state_bytes;
    closing_from.resize(sizes.closing_blocks_per_sequence);
    closing_to.resize(closing_from.size());
    closing_tokens.resize(closing_from.size());
  }
  Windowed(const Windowed&) = delete;

  // Tokens [first, first + count) of the sequence, through all verbs; returns attention's rows.
  std::vector<float> step(int first, int count) {
    OneSequence sequence({4, 1, 5, 0, 3, 2}, first + count);
    block_ids.assign(sequence.blocks.size(), -1);
    slots.assign(count, -1);
    window_slots = slots;
    const std::vector<int32_t> starts = {0, count};
    auto args = plan_args(sequence, starts);
    EXPECT_EQ(kvx_window_plan(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    const auto rows_of = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + first * 64, all.begin() + (first + count) * 64);
    };
    EXPECT_EQ(append_rows(pages.layer, rows_of(k), rows_of(v), slots), KVX_STATUS_OK);
    EXPECT_EQ(append_rows(copies.layer, rows_of(k), rows_of(v), window_slots), KVX_STATUS_OK);
    if (window.unit == KVX_WINDOW_BLOCKS) close();
    Attention attention(pages.layer, sequence, count);
    const kvx_block_table_t table =
        api::packed_table(block_ids, static_cast<uint32_t>(block_ids.size()));
    attention.args.block_table = &table;
    attention.args.full_precision = &copies.layer;
    attention.args.num_sink_blocks = &num_sinks;
    attention.args.first_recent_blocks = &first_recent;
    EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    q = attention.q;
    return attention.out;
  }

  // What attention reads: exact rows in the window, and pages' rows elsewhere.
  std::vector<float> expected(int num_tokens, int num_queries) {
    const OneSequence sequence({4, 1, 5, 0, 3, 2}, num_tokens);
    std::vector<float> k_rows(num_tokens * 64), v_rows(k_rows.size());
    EXPECT_EQ(gather_rows(pages.layer, sequence, k_rows, v_rows), KVX_STATUS_OK);
    for (int t = 0; t < num_tokens; ++t) {
      if (t / 8 >= num_sinks && t / 8 < first_recent) continue;
      std::copy_n(k.begin() + t * 64, 64, k_rows.begin() + t * 64);
      std::copy_n(v.begin() + t * 64, 64, v_rows.begin() + t * 64);
    }
    return plain_attention(q, k_rows, v_rows, num_queries, num_tokens, kQHeads, geometry);
  }

  kvx_window_plan_args_t plan_args(const OneSequence& sequence,
                                   const std::vector<int32_t>& starts) {
    auto args = sized<kvx_window_plan_args_t>();
    args.window = &window;
    args.block_table = &sequence.table;
    args.seq_lens = &sequence.seq_lens;
    args.q_starts = starts.data();
    args.num_tokens = std::ssize(slots);
    args.block_ids = block_ids.data();
    args.num_sink_blocks = &num_sinks;
    args.first_recent_blocks = &first_recent;
    args.slots = slots.data();
    args.window_slots = window_slots.data();
    args.closing_from = closing_from.data();
    args.closing_to = closing_to.data();
    args.closing_tokens = closing_tokens.data();
    return args;
  }

  const Geometry geometry;
  PagedLayer pages, copies;
  kvx_window_t window = sized<kvx_window_t>();
  kvx_window_sizes_t sizes = sized<kvx_window_sizes_t>();
  std::vector<int32_t> state, block_ids, closing_tokens;
  std::vector<int64_t> slots, window_slots, closing_from, closing_to;
  int32_t num_sinks = -1, first_recent = -1;
  std::vector<float> k = test_rows(48, 2, 32, 0.3f), v = test_rows(48, 2, 32, 1.9f), q;

 private:
  void close() {
    auto copy = sized<kvx_copy_args_t>();
    copy.num_copies = static_cast<uint32_t>(closing_from.size());
    copy.from = &copies.layer;
    copy.to = &pages.layer;
    copy.from_blocks = closing_from.data();
    copy.to_blocks = closing_to.data();
    copy.num_tokens = closing_tokens.data();
    EXPECT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_OK) << kvx_last_error();
  }
};

TEST(Window, AttentionReadsItsTokensInFullPrecisionAndTheOthersFromPages) {
  for (const uint32_t unit : {KVX_WINDOW_ROWS, KVX_WINDOW_BLOCKS}) {
    Windowed windowed(unit);
    int num_tokens = 0;
    for (const int count : {30, 1, 1, 1, 5, 1, 9}) {
      SCOPED_TRACE(std::to_string(unit) + ", tokens " + std::to_string(num_tokens));
      const std::vector<float> out = windowed.step(num_tokens, count);
      num_tokens += count;
      EXPECT_EQ(windowed.num_sinks, 1);
      EXPECT_EQ(windowed.first_recent, (num_tokens + 7) / 8 - 2);
      EXPECT_LT(largest_difference(out, windowed.expected(num_tokens, count)), 3e-4);
    }
  }
}

TEST(Window, CutInsideItIsExact) {
  for (const uint32_t unit : {KVX_WINDOW_ROWS, KVX_WINDOW_BLOCKS}) {
    Windowed straight(unit), cut(unit);
    straight.step(0, 37);
    const std::vector<float> expected = straight.step(37, 1);
    cut.step(0, 37);
    cut.step(37, 2);  // rejected drafts
    EXPECT_EQ(cut.step(37, 1), expected);
    EXPECT_EQ(cut.step(38, 2), straight.step(38, 2));
    EXPECT_EQ(cut.pages.memory, straight.pages.memory);
  }
}

TEST(Window, BlocksAreQuantisedWholeAsTheyClose) {
  Windowed rows(KVX_WINDOW_ROWS), blocks(KVX_WINDOW_BLOCKS);
  for (int t = 0; t < 40; ++t) {
    rows.step(t, 1);
    blocks.step(t, 1);
    EXPECT_EQ(rows.pages.memory == blocks.pages.memory, (t + 1) % 8 == 0) << t;
  }
}

TEST(Window, ForgottenPagesAreReadFromThePages) {
  Windowed windowed(KVX_WINDOW_ROWS);
  windowed.step(0, 20);
  const std::vector<int64_t> all = {0, 1, 2, 3, 4, 5};
  ASSERT_EQ(kvx_window_forget(&windowed.window, all.data(), 6, nullptr), KVX_STATUS_OK);
  const std::vector<float> out = windowed.step(20, 1);
  EXPECT_EQ(windowed.num_sinks, 0);
  EXPECT_EQ(windowed.first_recent, 3);
  EXPECT_LT(largest_difference(out, windowed.expected(21, 1)), 3e-4);
}

TEST(Window, CppFaceFillsTheStructs) {
  Windowed windowed(KVX_WINDOW_ROWS);
  kvx_window_t config = windowed.window;
  config.size = 0;
  config.state = nullptr;
  kvx::api::Window window(config);
  const auto sizes = window.sizes();
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes.value().window_blocks_per_sequence, 3u);
  EXPECT_EQ(sizes.value().closing_blocks_per_sequence, 4u);
  std::vector<int32_t> state(sizes.value().state_bytes / 4);
  window.set_state(state.data(), sizes.value().state_bytes);
  const OneSequence sequence({4, 1, 5, 0, 3, 2}, 20);
  const std::vector<int32_t> starts = {0, 20};
  windowed.slots.resize(20);
  windowed.window_slots.resize(20);
  windowed.block_ids.resize(6);
  ASSERT_TRUE(window.plan(windowed.plan_args(sequence, starts)).ok());
  EXPECT_EQ(windowed.num_sinks, 1);
  EXPECT_EQ(windowed.first_recent, 1);
  EXPECT_TRUE(window.forget(std::vector<int64_t>{4}).ok());
  EXPECT_FALSE(window.forget(std::vector<int64_t>{6}).ok());
}

TEST(Window, RefusesWhatDoesNotFitAndNamesIt) {
  Windowed windowed(KVX_WINDOW_BLOCKS);
  windowed.step(0, 20);
  const OneSequence sequence({4, 1, 5, 0, 3, 2}, 21);
  windowed.slots.resize(1);
  windowed.window_slots.resize(1);
  const std::vector<int32_t> starts = {0, 1};
  const std::vector<int32_t> state = windowed.state;
  const auto refuses = [&](kvx_status_t status, const char* words, const auto& change) {
    kvx_window_t window = windowed.window;
    kvx_window_plan_args_t args = windowed.plan_args(sequence, starts);
    args.window = &window;
    change(window, args);
    EXPECT_EQ(kvx_window_plan(&args, nullptr), status) << words;
    EXPECT_THAT(kvx_last_error(), HasSubstr(words));
    EXPECT_EQ(windowed.state, state);
  };
  refuses(kInvalid, "window is null", [](auto&, auto& args) { args.window = nullptr; });
  refuses(kInvalid, "window.block_size", [](auto& window, auto&) { window.block_size = 0; });
  refuses(kInvalid, "window.sink_tokens", [](auto& window, auto&) { window.sink_tokens = ~0u; });
  refuses(kInvalid, "window.unit is 2", [](auto& window, auto&) { window.unit = 2; });
  refuses(kInvalid, "window.num_blocks is 0", [](auto& window, auto&) { window.num_blocks = 0; });
  refuses(kInvalid, "window.num_window_blocks is -1",
          [](auto& window, auto&) { window.num_window_blocks = -1; });
  refuses(kInvalid, "window.memory is 9", [](auto& window, auto&) { window.memory = 9; });
  refuses(kInvalid, "window.state is", [](auto& window, auto&) { --window.state_bytes; });
  refuses(kInvalid, "window.state is", [](auto& window, auto&) { window.state = nullptr; });
  refuses(kInvalid, "window.counters", [](auto& window, auto&) {
    static uint64_t counters[2];
    window.counters = counters;
  });
  refuses(kInvalid, "args.reserved is 1", [](auto&, auto& args) { args.reserved = 1; });
  refuses(kInvalid, "args.num_tokens is -1", [](auto&, auto& args) { args.num_tokens = -1; });
  refuses(kInvalid, "q_starts[0..1]", [](auto&, auto& args) { args.num_tokens = 0; });
  refuses(kInvalid, "args.slots is null", [](auto&, auto& args) { args.slots = nullptr; });
  refuses(kInvalid, "args.closing_to", [](auto&, auto& args) { args.closing_to = nullptr; });
  refuses(kInvalid, "args.block_ids", [](auto&, auto& args) { args.block_ids = nullptr; });
  refuses(KVX_STATUS_OUT_OF_RANGE, "block_table[0][0] is 4",
          [](auto& window, auto&) { window.num_blocks = 4; });
  const std::vector<int64_t> beyond = {0, 6};
  EXPECT_EQ(kvx_window_forget(&windowed.window, beyond.data(), 2, nullptr),
            KVX_STATUS_OUT_OF_RANGE);
  EXPECT_THAT(kvx_last_error(), HasSubstr("blocks[1] is 6"));
  EXPECT_EQ(kvx_window_forget(&windowed.window, nullptr, 2, nullptr), kInvalid);
  EXPECT_EQ(kvx_window_sizes(&windowed.window, nullptr), kInvalid);
  EXPECT_EQ(windowed.state, state);
}

}  // namespace
}  // namespace kvx::api_test::window_test
