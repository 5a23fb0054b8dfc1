// Steps of many blocks with a full-precision window: what they give, store and leave behind is what
// a caller gets who splits the tokens at block boundaries.
#include <gtest/gtest.h>

#include <limits>

#include "kv/kv_step.hpp"
#include "tests/kv/stream.hpp"

namespace kvx::kv::long_step_test {
namespace {

constexpr int kBlockSize = 16;
constexpr int kWhole = std::numeric_limits<int>::max();

// Steps that end where a block ends.
std::vector<float> feed_by_blocks(KvCache& cache, int sequence, const Stream& stream, int first,
                                  int last, int read_layer = 0) {
  KvStep step(cache);
  std::vector<float> out;
  for (int at = first; at < last;) {
    const int count = std::min(kBlockSize - at % kBlockSize, last - at);
    const std::vector<float> some =
        feed(step, cache, sequence, stream, at, at + count, count, read_layer);
    out.insert(out.end(), some.begin(), some.end());
    at += count;
  }
  return out;
}

// All stored rows of a layer, K then V.
std::vector<float> stored_rows(const KvCache& cache, int sequence, int layer, int64_t first) {
  const int64_t count = cache.num_tokens(sequence) - first;
  std::vector<float> k(static_cast<size_t>(count) * kNumKvHeads * kHeadDim);
  std::vector<float> v(k.size());
  const Status done = gather(cache, sequence, layer, first, count,
                             dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim),
                             dense_rows(v.data(), DType::kF32, kNumKvHeads, kHeadDim));
  EXPECT_TRUE(done.ok()) << done.error().message;
  k.insert(k.end(), v.begin(), v.end());
  return k;
}

void expect_same_blocks_in_use(const KvCache& one, const KvCache& other) {
  const KvCacheSnapshot a = one.snapshot();
  const KvCacheSnapshot b = other.snapshot();
  for (size_t c = 0; c < a.classes.size(); ++c) {
    EXPECT_EQ(a.classes[c].num_active, b.classes[c].num_active) << a.classes[c].name;
  }
}

struct Cut {
  int before = 0;  // tokens, block by block
  int end = 0;     // of the step
};

void expect_as_by_blocks(const KvCacheConfig& config, const Cut& cut, int read_layer = 0) {
  SCOPED_TRACE(testing::Message() << config.recipe.text << ", " << cut.before << " to " << cut.end);
  const Stream stream(cut.end + 20);
  const auto at_once = created(config);
  const auto by_blocks = created(config);
  const int one = at_once->create_sequence().value();
  const int two = by_blocks->create_sequence().value();
  feed_by_blocks(*at_once, one, stream, 0, cut.before);
  feed_by_blocks(*by_blocks, two, stream, 0, cut.before);
  EXPECT_EQ(at_once->max_step_tokens(one), config.max_tokens_per_sequence - cut.before);
  KvStep step(*at_once);
  EXPECT_EQ(feed(step, *at_once, one, stream, cut.before, cut.end, kWhole, read_layer),
            feed_by_blocks(*by_blocks, two, stream, cut.before, cut.end, read_layer));
  ASSERT_TRUE(at_once->release_expired(one).ok());
  ASSERT_TRUE(by_blocks->release_expired(two).ok());
  const int window = config.geometry.window_of(0);
  const int64_t first = window == 0 ? 0 : cut.end - window + 1;
  for (int layer = 0; layer < kNumLayers; ++layer) {
    const int64_t from = config.geometry.window_of(layer) == 0 ? 0 : first;
    EXPECT_EQ(stored_rows(*at_once, one, layer, from), stored_rows(*by_blocks, two, layer, from));
  }
  expect_same_blocks_in_use(*at_once, *by_blocks);
  // And so it goes on.
  EXPECT_EQ(feed_by_blocks(*at_once, one, stream, cut.end, cut.end + 20),
            feed_by_blocks(*by_blocks, two, stream, cut.end, cut.end + 20));
}

TEST(LongStep, GivesWhatBlockByBlockGives) {
  for (const char* recipe :
       {"int8:auto", "int8/int4:sink=20,recent=40", "nvfp4:recent=16,full_precision=f16",
        "int4:sink=16,recent=1", "int4:recent=0", "int8:source=page,recent=32"}) {
    for (const Cut cut : {Cut{0, 100}, Cut{0, 17}, Cut{5, 100}, Cut{64, 200}, Cut{75, 333}}) {
      expect_as_by_blocks(config_of(recipe, kBlockSize), cut);
    }
  }
}

// The bytes of every layer are its own: the last layer's pass reads none of the first one's.
TEST(LongStep, GivesTheSameInEveryLayer) {
  expect_as_by_blocks(config_of("int8:sink=16,recent=32", kBlockSize), {37, 180}, kNumLayers - 1);
}

TEST(LongStep, GivesTheSameWithSlidingWindows) {
  KvCacheConfig config = config_of("int8:sink=16,recent=32", kBlockSize);
  config.geometry.layer_windows = {24, 0};
  expect_as_by_blocks(config, {21, 190});
  config.geometry.layer_windows = {100, 0};
  config.geometry.layer_sinks = {3, 0};
  expect_as_by_blocks(config, {70, 230}, 1);
}

// The pool of a cache for one sequence holds just the full-precision blocks of its window.
TEST(LongStep, NeedsNoMoreBlocksThanOneSequenceHolds) {
  KvCacheConfig config = config_of("int8:sink=16,recent=48", kBlockSize);
  config.max_sequences = 1;
  expect_as_by_blocks(config, {0, 380});
  expect_as_by_blocks(config, {71, 380});
}

// Rows of entries that lie one after the other: two long ones with a short one between them.
TEST(LongStep, TakesSequencesOfDifferentLengths) {
  KvCacheConfig config = config_of("int8:sink=16,recent=32", kBlockSize);
  config.max_sequences = 3;
  const std::vector<int> before = {10, 50, 0};
  const std::vector<int> counts = {70, 1, 45};
  const auto batched = created(config);
  const auto alone = created(config);
  std::vector<Stream> streams;
  std::vector<StepEntry> entries;
  std::vector<float> q, k, v, expected;
  for (uint32_t s = 0; s < 3; ++s) {
    streams.emplace_back(100, s + 1);
    const Stream& stream = streams.back();
    entries.push_back({batched->create_sequence().value(), counts[s]});
    const int same = alone->create_sequence().value();
    feed_by_blocks(*batched, entries[s].sequence, stream, 0, before[s]);
    feed_by_blocks(*alone, same, stream, 0, before[s]);
    const auto rows = feed_by_blocks(*alone, same, stream, before[s], before[s] + counts[s]);
    expected.insert(expected.end(), rows.begin(), rows.end());
    const auto add = [&](std::vector<float>& to, const std::vector<float>& from, int heads) {
      const auto width = static_cast<ptrdiff_t>(heads * kHeadDim);
      to.insert(to.end(), from.begin() + before[s] * width,
                from.begin() + (before[s] + counts[s]) * width);
    };
    add(q, stream.q, kNumQHeads);
    add(k, stream.k, kNumKvHeads);
    add(v, stream.v, kNumKvHeads);
  }
  std::vector<float> out(expected.size());
  KvStep step(*batched);
  ASSERT_TRUE(step.begin(entries).ok());
  for (int layer = 0; layer < kNumLayers; ++layer) {
    const auto rows = [](const std::vector<float>& from, int heads) {
      return dense_rows(static_cast<const void*>(from.data()), DType::kF32, heads, kHeadDim);
    };
    const Status done = append_and_attend(
        *batched, step, 116, layer, params(), rows(q, kNumQHeads), rows(k, kNumKvHeads),
        rows(v, kNumKvHeads), dense_rows(out.data(), DType::kF32, kNumQHeads, kHeadDim));
    ASSERT_TRUE(done.ok()) << done.error().message;
    if (layer > 0) continue;
    EXPECT_EQ(out, expected);
  }
  ASSERT_TRUE(step.check_rows().ok());
  ASSERT_TRUE(step.end().ok());
  expect_same_blocks_in_use(*batched, *alone);
}

// A fork's blocks and cached ones are read while they are in the window, and never written.
TEST(LongStep, LeavesForksAndCachedBlocksAsTheyAre) {
  KvCacheConfig config = config_of("int8:recent=48", kBlockSize);
  config.prefix.is_on = true;
  const auto cache = created(config);
  const Stream stream(300);
  const int one = cache->create_sequence().value();
  feed_by_blocks(*cache, one, stream, 0, 70);
  std::vector<int32_t> ids(70, 7);
  ASSERT_TRUE(cache->record_tokens(one, ids).ok());
  const int fork = cache->fork_sequence(one).value();
  const std::vector<float> before = stored_rows(*cache, one, 0, 0);
  const std::vector<float> long_rows = feed(*cache, fork, stream, 70, 260, kWhole);
  EXPECT_EQ(stored_rows(*cache, one, 0, 0), before);
  EXPECT_EQ(feed_by_blocks(*cache, one, stream, 70, 260), long_rows);
}

// ---- what does not come to its end

Status run_layer(KvCache& cache, KvStep& step, const Stream& stream, int first, int count,
                 int layer) {
  std::vector<float> out(static_cast<size_t>(count) * kNumQHeads * kHeadDim);
  return append_and_attend(
      cache, step, count, layer, params(), stream.rows(stream.q, kNumQHeads, first),
      stream.rows(stream.k, kNumKvHeads, first), stream.rows(stream.v, kNumKvHeads, first),
      dense_rows(out.data(), DType::kF32, kNumQHeads, kHeadDim));
}

// As a step that is cancelled before its first layer: full blocks that it let leave the window stay
// packed, and the open block's bytes are back though others were written in its place.
TEST(LongStep, CancelledInTheMiddleLeavesTheTokensOfBefore) {
  constexpr int kCount = 120;
  KvCacheConfig config = config_of("int8:sink=16,recent=32", kBlockSize);
  config.max_sequences = 1;
  const Stream stream(400);
  for (const int before : {0, 32, 59, 90}) {
    SCOPED_TRACE(before);
    const auto cache = created(config);
    const auto untouched = created(config);
    const int sequence = cache->create_sequence().value();
    const int same = untouched->create_sequence().value();
    feed_by_blocks(*cache, sequence, stream, 0, before);
    feed_by_blocks(*untouched, same, stream, 0, before);
    const StepEntry entry{sequence, kCount};
    for (KvCache* one : {cache.get(), untouched.get()}) {
      KvStep step(*one);
      ASSERT_TRUE(step.begin({&entry, 1}).ok());
      if (one == cache.get()) {
        ASSERT_TRUE(run_layer(*one, step, stream, before, kCount, 0).ok());
      }
      ASSERT_TRUE(step.cancel().ok());
    }
    EXPECT_EQ(cache->num_tokens(sequence), before);
    expect_same_blocks_in_use(*cache, *untouched);
    for (int layer = 0; before > 0 && layer < kNumLayers; ++layer) {
      EXPECT_EQ(stored_rows(*cache, sequence, layer, 0), stored_rows(*untouched, same, layer, 0));
    }
    KvStep step(*cache);
    EXPECT_EQ(feed(step, *cache, sequence, stream, before, before + 200, kWhole),
              feed_by_blocks(*untouched, same, stream, before, before + 200));
  }
}

TEST(LongStep, TakesEachLayerOnce) {
  const auto cache = created(config_of("int8:recent=32", kBlockSize));
  const Stream stream(100);
  const StepEntry entry{cache->create_sequence().value(), 100};
  KvStep step(*cache);
  ASSERT_TRUE(step.begin({&entry, 1}).ok());
  ASSERT_TRUE(run_layer(*cache, step, stream, 0, 100, 0).ok());
  const Status again = run_layer(*cache, step, stream, 0, 100, 0);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(
      again.error().message,
      "layer 0 has rows of this step; a step that fills several blocks takes each layer once");
  ASSERT_TRUE(run_layer(*cache, step, stream, 0, 100, 1).ok());
  EXPECT_TRUE(step.end().ok());
}

// Speculative tokens: blocks that left the window for them stay packed, as after steps by block.
TEST(LongStep, KeepsTokensAsFarAsTheyAreInFullPrecision) {
  KvCacheConfig config = config_of("int8:recent=32", kBlockSize);
  const auto cache = created(config);
  const auto by_blocks = created(config);
  const Stream stream(200);
  const int one = cache->create_sequence().value();
  const int two = by_blocks->create_sequence().value();
  feed_by_blocks(*cache, one, stream, 0, 20);
  feed_by_blocks(*by_blocks, two, stream, 0, 20);
  const StepEntry entry{one, 80, true};
  KvStep step(*cache);
  ASSERT_TRUE(step.begin({&entry, 1}).ok());
  for (int layer = 0; layer < kNumLayers; ++layer) {
    ASSERT_TRUE(run_layer(*cache, step, stream, 20, 80, layer).ok());
  }
  const int too_few = 30;  // token 50 is in a block that is packed by now
  const Status refused = step.end({&too_few, 1});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  ASSERT_TRUE(step.is_open());
  const int kept = 70;
  ASSERT_TRUE(step.end({&kept, 1}).ok());
  EXPECT_EQ(cache->num_tokens(one), 90);
  feed_by_blocks(*by_blocks, two, stream, 20, 100);
  ASSERT_TRUE(by_blocks->truncate_sequence(two, 90).ok());
  expect_same_blocks_in_use(*cache, *by_blocks);
  EXPECT_EQ(stored_rows(*cache, one, 0, 0), stored_rows(*by_blocks, two, 0, 0));
}

TEST(LongStep, WithTooFewBlocksChangesNothing) {
  KvCacheConfig config = config_of("int8:recent=32", kBlockSize);
  config.max_sequences = 1;
  config.memory_budget_bytes = created(config)->account().allocated.total();
  config.max_sequences = 2;
  const auto cache = created(config);
  const Stream stream(400);
  const int one = cache->create_sequence().value();
  const int two = cache->create_sequence().value();
  feed_by_blocks(*cache, one, stream, 0, 20);
  const KvCacheSnapshot before = cache->snapshot();
  const StepEntry entries[] = {{one, 300}, {two, 300}};
  const Status refused = cache->begin_step(entries);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfRange);
  const KvCacheSnapshot after = cache->snapshot();
  for (size_t c = 0; c < before.classes.size(); ++c) {
    EXPECT_EQ(after.classes[c].num_active, before.classes[c].num_active);
  }
}

}  // namespace
}  // namespace kvx::kv::long_step_test
