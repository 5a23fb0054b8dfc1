// Dual-scale formats in a caller's pages: whole blocks, a window beside them whose plan evicts and
// reopens blocks, and what is refused by name.
#include <gmock/gmock.h>

#include <cstring>
#include <numeric>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::dual_window_test {
namespace {

using testing::HasSubstr;

constexpr int kBlock = 64;
constexpr int kDim = 64;
constexpr int kRow = 2 * kDim;  // two heads
constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;

// Sequences of a step: their pages, tokens before and new tokens, which are rows of `texts`.
struct Part {
  std::vector<int32_t> pages;
  int before = 0;
  int count = 0;
  int text = 0;
};

// A layer of pages and a window in BF16 with 64 sink tokens and 64 recent ones.
class DualWindow {
 public:
  static constexpr uint32_t kPages = 24;

  explicit DualWindow(kvx_format_t format, uint32_t max_sequences = 2, uint32_t block = kBlock)
      : pages({kPages, block, 2, kDim}, in_page(format), in_page(format)) {
    window.block_size = block;
    window.sink_tokens = window.recent_tokens = 64;
    window.unit = KVX_WINDOW_BLOCKS;
    window.memory = KVX_MEMORY_HOST;
    window.num_blocks = kPages;
    window.num_window_blocks = 1;
    EXPECT_EQ(kvx_window_sizes(&window, &sizes), KVX_STATUS_OK) << kvx_last_error();
    window.num_window_blocks =
        static_cast<int64_t>(sizes.closing_blocks_per_sequence) * max_sequences;
    EXPECT_EQ(kvx_window_sizes(&window, &sizes), KVX_STATUS_OK) << kvx_last_error();
    state.resize(sizes.state_bytes / 4);
    window.state = state.data();
    window.state_bytes = sizes.state_bytes;
    const Geometry of_window{static_cast<uint32_t>(window.num_window_blocks), block, 2, kDim};
    copies =
        std::make_unique<PagedLayer>(of_window, in_page(KVX_FORMAT_BF16), in_page(KVX_FORMAT_BF16));
  }

  void step(const std::vector<Part>& parts) {
    plan(parts);
    ASSERT_EQ(kvx_window_plan(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    for (const int32_t tokens : reopened_tokens) num_reopened += tokens > 0 ? 1 : 0;
    copy(copies->layer, pages.layer, evicted_from, evicted_to, evicted_tokens);
    copy(pages.layer, copies->layer, reopened_from, reopened_to, reopened_tokens);
    append(pages.layer, slots);
    append(copies->layer, window_slots);
    copy(copies->layer, pages.layer, closing_from, closing_to, closing_tokens);
  }

  // The keys of a sequence of the last step as attention reads them.
  std::vector<float> keys(int sequence, int num_tokens) {
    std::vector<float> all;
    for (int b = 0; b * kBlock < num_tokens; ++b) {
      const bool is_copy = b < num_sinks[sequence] || b >= first_recent[sequence];
      const int tokens = std::min(kBlock, num_tokens - b * kBlock);
      const OneSequence block({block_ids[sequence * width + b]}, tokens);
      std::vector<float> k(tokens * kRow), v(k.size());
      EXPECT_EQ(gather_rows(is_copy ? copies->layer : pages.layer, block, k, v), KVX_STATUS_OK);
      all.insert(all.end(), k.begin(), k.end());
    }
    return all;
  }

  // Attention of each sequence's last query, and what it should be of those keys as values too.
  void expect_attention(const std::vector<Part>& parts) {
    const int num = static_cast<int>(parts.size());
    const std::vector<float> q = test_rows(num, 4, kDim, 4.2f);
    std::vector<float> out(q.size());
    std::vector<int32_t> one_each(num + 1);
    std::iota(one_each.begin(), one_each.end(), 0);
    const kvx_rows_t q_rows = api::rows(q.data(), KVX_DTYPE_F32);
    const kvx_rows_t out_rows = api::rows(out.data(), KVX_DTYPE_F32);
    const auto ids = api::packed_table(block_ids, static_cast<uint32_t>(width));
    auto attend = sized<kvx_attend_args_t>();
    attend.num_q_heads = 4;
    attend.layer = &pages.layer;
    attend.block_table = &ids;
    attend.seq_lens = &seq_lens;
    attend.q_starts = one_each.data();
    attend.q = &q_rows;
    attend.out = &out_rows;
    attend.full_precision = &copies->layer;
    attend.num_sink_blocks = num_sinks.data();
    attend.first_recent_blocks = first_recent.data();
    ASSERT_EQ(kvx_attend(&attend, nullptr), KVX_STATUS_OK) << kvx_last_error();
    for (int s = 0; s < num; ++s) {
      const std::vector<float> k = keys(s, lengths[s]);
      const std::vector<float> one(q.begin() + s * 4 * kDim, q.begin() + (s + 1) * 4 * kDim);
      const std::vector<float> expected =
          plain_attention(one, k, k, 1, lengths[s], 4, {kPages, kBlock, 2, kDim});
      const std::vector<float> found(out.begin() + s * 4 * kDim, out.begin() + (s + 1) * 4 * kDim);
      EXPECT_LT(largest_difference(found, expected), 4e-4) << "sequence " << s;
    }
  }

  void plan(const std::vector<Part>& parts) {
    const auto num = parts.size();
    width = 0;
    for (const Part& part : parts) width = std::max(width, part.pages.size());
    table_ids.assign(num * width, 0);
    lengths.clear();
    starts = {0};
    rows.clear();
    for (size_t s = 0; s < num; ++s) {
      const Part& part = parts[s];
      std::copy(part.pages.begin(), part.pages.end(), table_ids.begin() + s * width);
      lengths.push_back(part.before + part.count);
      starts.push_back(starts.back() + part.count);
      const std::vector<float> text = text_of(part.text);
      rows.insert(rows.end(), text.begin() + part.before * kRow,
                  text.begin() + (part.before + part.count) * kRow);
    }
    table = api::packed_table(table_ids, static_cast<uint32_t>(width));
    seq_lens = api::seq_lens(lengths);
    block_ids.assign(num * width, -1);
    num_sinks.assign(num, -1);
    first_recent = num_sinks;
    slots.assign(starts.back(), -9);
    window_slots = slots;
    closing_from.assign(num * sizes.closing_blocks_per_sequence, -9);
    closing_to = evicted_from = evicted_to = closing_from;
    closing_tokens.assign(closing_from.size(), -9);
    evicted_tokens = closing_tokens;
    reopened_from.assign(num, -9);
    reopened_to = reopened_from;
    reopened_tokens.assign(num, -9);
    args = sized<kvx_window_plan_args_t>();
    args.window = &window;
    args.block_table = &table;
    args.seq_lens = &seq_lens;
    args.q_starts = starts.data();
    args.num_tokens = std::ssize(slots);
    args.block_ids = block_ids.data();
    args.num_sink_blocks = num_sinks.data();
    args.first_recent_blocks = first_recent.data();
    args.slots = slots.data();
    args.window_slots = window_slots.data();
    args.closing_from = closing_from.data();
    args.closing_to = closing_to.data();
    args.closing_tokens = closing_tokens.data();
    args.evicted_from = evicted_from.data();
    args.evicted_to = evicted_to.data();
    args.evicted_tokens = evicted_tokens.data();
    args.reopened_from = reopened_from.data();
    args.reopened_to = reopened_to.data();
    args.reopened_tokens = reopened_tokens.data();
  }

  static std::vector<float> text_of(int text) {
    std::vector<float> rows = test_rows(400, 2, kDim, 0.3f + static_cast<float>(text));
    for (float& x : rows) {  // numbers that bf16 stores exactly
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      bits &= 0xFFFF0000u;
      std::memcpy(&x, &bits, sizeof bits);
    }
    return rows;
  }

  PagedLayer pages;
  std::unique_ptr<PagedLayer> copies;
  kvx_window_t window = sized<kvx_window_t>();
  kvx_window_sizes_t sizes = sized<kvx_window_sizes_t>();
  kvx_window_plan_args_t args;
  kvx_block_table_t table;
  kvx_seq_lens_t seq_lens;
  size_t width = 0;
  int num_reopened = 0;
  std::vector<int32_t> state, table_ids, lengths, starts, block_ids, num_sinks, first_recent;
  std::vector<int32_t> closing_tokens, evicted_tokens, reopened_tokens;
  std::vector<int64_t> slots, window_slots, closing_from, closing_to, evicted_from, evicted_to;
  std::vector<int64_t> reopened_from, reopened_to;
  std::vector<float> rows;

 private:
  static void copy(const kvx_layer_t& from, const kvx_layer_t& to,
                   const std::vector<int64_t>& from_blocks, const std::vector<int64_t>& to_blocks,
                   const std::vector<int32_t>& tokens) {
    auto copy = sized<kvx_copy_args_t>();
    copy.num_copies = static_cast<uint32_t>(from_blocks.size());
    copy.from = &from;
    copy.to = &to;
    copy.from_blocks = from_blocks.data();
    copy.to_blocks = to_blocks.data();
    copy.num_tokens = tokens.data();
    ASSERT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_OK) << kvx_last_error();
  }
  void append(const kvx_layer_t& layer, const std::vector<int64_t>& to) const {
    const kvx_rows_t given = api::rows(rows.data(), KVX_DTYPE_F32);
    kvx_append_args_t append = append_args(layer, given, to);
    append.window_dtype = KVX_DTYPE_BF16;
    ASSERT_EQ(kvx_append(&append, nullptr), KVX_STATUS_OK) << kvx_last_error();
  }
};

constexpr kvx_format_t kFormats[] = {KVX_FORMAT_INT4_DUAL, KVX_FORMAT_INT3_DUAL,
                                     KVX_FORMAT_INT2_DUAL};

TEST(DualWindow, BytesDoNotDependOnTheSteps) {
  for (const kvx_format_t format : kFormats) {
    DualWindow at_once(format), in_steps(format);
    const std::vector<int32_t> pages = {5, 2, 9, 11, 0};
    at_once.step({{pages, 0, 300, 0}});
    for (int before = 0, i = 0; before < 300; ++i) {
      const int count = std::min(300 - before, i % 3 == 0 ? 70 : 1);
      in_steps.step({{pages, before, count, 0}});
      before += count;
    }
    EXPECT_EQ(at_once.pages.memory, in_steps.pages.memory);
    EXPECT_EQ(in_steps.num_reopened, 0);
  }
}

TEST(DualWindow, AttentionReadsThePagesAndTheWindow) {
  for (const kvx_format_t format : kFormats) {
    DualWindow windowed(format, 3);
    const std::vector<Part> prompts = {
        {{5, 2, 9, 11, 0}, 0, 299, 0}, {{1}, 0, 7, 1}, {{3, 4, 6}, 0, 128, 2}};
    windowed.step(prompts);
    std::vector<Part> decodes;
    for (const Part& part : prompts) decodes.push_back({part.pages, part.count, 1, part.text});
    windowed.step(decodes);
    windowed.expect_attention(decodes);
    EXPECT_EQ(windowed.num_sinks, std::vector<int32_t>(3, 1));
    EXPECT_EQ(windowed.first_recent, (std::vector<int32_t>{3, 1, 1}));
  }
}

// Rows of an open block whose place others took are those of its page again, and new ones exact.
TEST(DualWindow, SequenceThatSkipsStepsIsReopened) {
  DualWindow windowed(KVX_FORMAT_INT4_DUAL, 1);
  windowed.step({{{0, 1}, 0, 100, 0}});
  for (int other = 1; other < 9; ++other)
    windowed.step({{{2 * other, 2 * other + 1}, 0, 65, other}});
  windowed.step({{{0, 1}, 100, 3, 0}});
  EXPECT_EQ(windowed.num_reopened, 1);
  const std::vector<float> keys = windowed.keys(0, 103), text = DualWindow::text_of(0);
  double error = 0, size = 0;
  for (size_t i = 0; i < 100 * kRow; ++i) {
    error += (keys[i] - text[i]) * (keys[i] - text[i]);
    size += text[i] * text[i];
  }
  EXPECT_LT(std::sqrt(error / size), 0.1);
  EXPECT_TRUE(std::equal(keys.begin() + 100 * kRow, keys.end(), text.begin() + 100 * kRow));
}

TEST(DualPages, HaveTheirChannelsInThePage) {
  DualWindow windowed(KVX_FORMAT_INT3_DUAL);
  EXPECT_EQ(windowed.pages.bytes_per_token, 2u * (24 + 1 + 2));
  auto* first = windowed.pages.memory.data();
  EXPECT_EQ(windowed.pages.k.channels, first + kBlock * (24 + 1));
  EXPECT_EQ(windowed.pages.v.channels, first + kBlock * (24 + 1 + 2 + 24 + 1));
  EXPECT_EQ(windowed.pages.k.channel_head_stride, kBlock * 54);
  kvx_side_t shorter{};
  shorter.size = offsetof(kvx_side_t, channels);
  EXPECT_EQ(kvx_describe_pages(&windowed.pages.page, first, 2, &shorter, &windowed.pages.v),
            kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("k.size is 120; expected at least 144"));
}

TEST(DualPages, RefusalsNameTheField) {
  const auto appended = [](DualWindow& to, const std::vector<int64_t>& slots, uint32_t dtype = 0) {
    const std::vector<float> rows = test_rows(200, 2, kDim, 0.3f);
    const kvx_rows_t given = api::rows(rows.data(), KVX_DTYPE_F32);
    kvx_append_args_t args = append_args(to.pages.layer, given, slots);
    args.window_dtype = dtype;
    return kvx_append(&args, nullptr);
  };
  std::vector<int64_t> slots(kBlock);
  std::iota(slots.begin(), slots.end(), kBlock);
  DualWindow windowed(KVX_FORMAT_INT3_DUAL);
  EXPECT_EQ(appended(windowed, slots), KVX_STATUS_OK) << kvx_last_error();
  const std::vector<uint8_t> before = windowed.pages.memory;
  EXPECT_EQ(appended(windowed, slots, 99), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("args.window_dtype is 99"));
  slots.pop_back();
  EXPECT_EQ(appended(windowed, slots), kInvalid);
  EXPECT_THAT(kvx_last_error(),
              HasSubstr("slot_mapping[0] begins 63 tokens of block 1; int3_dual"));
  EXPECT_EQ(windowed.pages.memory, before);

  const auto refuses = [&](const char* words) {
    EXPECT_NE(appended(windowed, {}), KVX_STATUS_OK) << words;
    EXPECT_THAT(kvx_last_error(), HasSubstr(words));
  };
  void* const channels = windowed.pages.k.channels;
  windowed.pages.k.channels = nullptr;
  refuses("layer.runs[0].k.channels is null; int3_dual");
  windowed.pages.k.channels = channels;
  windowed.pages.k.channel_block_stride = 8;
  refuses("layer.runs[0].k.channels");
  windowed.pages.k.channel_block_stride = windowed.pages.k.code_block_stride;
  windowed.pages.layer.block_size = 32;
  refuses("block_size is 32; int3_dual quantises blocks of 64 or 128 tokens");
  windowed.pages.layer.block_size = kBlock;
  PagedLayer of_rows({4, kBlock, 2, kDim}, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT8));
  of_rows.k.channels = channels;
  auto nothing = sized<kvx_copy_args_t>();
  nothing.from = nothing.to = &of_rows.layer;
  EXPECT_EQ(kvx_copy_blocks(&nothing, nullptr), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("k.channels is set; int8 has none"));
  of_rows.k.channels = nullptr;

  const std::vector<int64_t> slot = {0};
  auto transcode = sized<kvx_transcode_args_t>();
  transcode.from = &of_rows.layer;
  transcode.to = &windowed.pages.layer;
  transcode.num_tokens = 1;
  transcode.slot_dtype = KVX_DTYPE_S64;
  transcode.from_slots = transcode.to_slots = slot.data();
  EXPECT_EQ(kvx_transcode(&transcode, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_THAT(kvx_last_error(), HasSubstr("to is stored in int3_dual"));
}

TEST(DualWindow, PlanNamesListsAndWindowBlocksThatAreMissing) {
  DualWindow windowed(KVX_FORMAT_INT2_DUAL, 1);
  const auto refuses = [&](const char* words, const auto& change) {
    windowed.plan({{{0, 1}, 0, 70, 0}, {{2}, 0, 3, 1}});
    change();
    EXPECT_EQ(kvx_window_plan(&windowed.args, nullptr), kInvalid) << words;
    EXPECT_THAT(kvx_last_error(), HasSubstr(words));
  };
  refuses("num_window_blocks is 4; 2 sequences whose blocks are reopened need 8", [] {});
  refuses("args.reopened_to is null and evicted_from is not null",
          [&] { windowed.args.reopened_to = nullptr; });
  windowed.window.unit = KVX_WINDOW_ROWS;
  refuses("only KVX_WINDOW_BLOCKS evicts blocks", [] {});
}

}  // namespace
}  // namespace kvx::api_test::dual_window_test
