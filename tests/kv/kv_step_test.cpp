// KvStep: many writers on one cache, each with a step of its own, get what each would get alone.
#include "kv/kv_step.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "tests/kv/stream.hpp"

namespace kvx::kv::kv_step_test {
namespace {

constexpr int kNumWriters = 4;
constexpr int kNumTokens = 72;
constexpr int kNumCommon = 40;  // tokens that all streams begin with

std::unique_ptr<KvCache> cache_for_writers(std::string_view recipe, int max_sequences,
                                           int64_t host_bytes = 0) {
  KvCacheConfig config = config_of(recipe, 16);
  config.max_sequences = max_sequences;
  config.max_tokens_per_sequence = kNumTokens;
  config.prefix.is_on = true;
  if (host_bytes > 0) config.tiers = {{.budget_bytes = host_bytes}};
  return created(std::move(config));
}

struct Writing {
  Stream stream;
  std::vector<int32_t> ids;
  std::vector<float> alone;  // what layer 0 gives when nobody else is there
};

Writing make_writing(std::string_view recipe, uint32_t seed) {
  static const Stream common(kNumCommon, 100);
  Writing made{Stream(kNumTokens, seed), {}, {}};
  const auto begin_alike = [](const std::vector<float>& from, std::vector<float>& to) {
    std::copy(from.begin(), from.end(), to.begin());
  };
  begin_alike(common.q, made.stream.q);
  begin_alike(common.k, made.stream.k);
  begin_alike(common.v, made.stream.v);
  for (int i = 0; i < kNumTokens; ++i) {
    made.ids.push_back(i < kNumCommon ? i : static_cast<int32_t>(1000 * seed) + i);
  }
  const auto cache = cache_for_writers(recipe, 1);
  const int sequence = cache->create_sequence().value();
  made.alone = feed(*cache, sequence, made.stream, 0, kNumTokens, 1);
  return made;
}

// The rows of tokens [first, last) of what a writer gets alone.
std::vector<float> rows_alone(const Writing& writing, int64_t first, int64_t last) {
  constexpr int64_t kWidth = kNumQHeads * kHeadDim;
  return {writing.alone.begin() + first * kWidth, writing.alone.begin() + last * kWidth};
}

// One sequence from its first token to its last, with a fork and a cut on the way.
void write_once(KvCache& cache, KvStep& step, const Writing& writing, bool begins_with_prefix) {
  const Result<int> created =
      begins_with_prefix ? cache.create_sequence_from({}, writing.ids) : cache.create_sequence();
  ASSERT_TRUE(created.ok()) << created.error().message;
  const int sequence = created.value();
  const auto begin = static_cast<int>(cache.num_tokens(sequence));
  const auto write = [&](int one, int first, int last) {
    EXPECT_EQ(feed(step, cache, one, writing.stream, first, last, 1),
              rows_alone(writing, first, last));
    const std::span<const int32_t> ids(writing.ids);
    EXPECT_TRUE(cache.record_tokens(one, ids.subspan(first, last - first)).ok());
  };
  if (begin < 50) write(sequence, begin, 50);
  const int64_t num_tokens = cache.num_tokens(sequence);
  const int fork = cache.fork_sequence(sequence).value();
  write(fork, static_cast<int>(num_tokens), kNumTokens);
  EXPECT_TRUE(cache.free_sequence(fork).ok());
  EXPECT_TRUE(cache.truncate_sequence(sequence, 48).ok());
  write(sequence, 48, kNumTokens);
  EXPECT_TRUE(cache.free_sequence(sequence).ok());
}

void expect_writers_undisturbed(std::string_view recipe, bool begins_with_prefix,
                                int64_t host_bytes = 0) {
  const auto cache = cache_for_writers(recipe, 2 * kNumWriters, host_bytes);
  std::vector<Writing> writings;
  for (uint32_t w = 0; w < kNumWriters; ++w) writings.push_back(make_writing(recipe, w + 1));
  std::vector<std::thread> writers;
  for (const Writing& writing : writings) {
    writers.emplace_back([&cache, &writing, begins_with_prefix] {
      KvStep step(*cache);
      for (int i = 0; i < 4; ++i) write_once(*cache, step, writing, begins_with_prefix);
    });
  }
  std::thread watcher([&cache] {
    for (int i = 0; i < 50; ++i) {
      const KvCacheSnapshot seen = cache->snapshot();
      for (const cache::BlockClassSnapshot& one : seen.classes) EXPECT_GE(one.num_free, 0);
      if (i % 10 != 0) continue;
      EXPECT_TRUE(cache->clear_prefixes().ok());
    }
  });
  for (std::thread& writer : writers) writer.join();
  watcher.join();
  cache->wait_for_tiers();
  for (const cache::BlockClassSnapshot& one : cache->snapshot().classes) {
    EXPECT_EQ(one.num_active, 0) << one.name;
  }
}

TEST(KvStep, ManyWritersGetWhatEachGetsAlone) {
  expect_writers_undisturbed("int8/int4", true);
}

TEST(KvStep, ManyWritersGetWhatEachGetsAloneWithAHostTier) {
  expect_writers_undisturbed("int8/int4", true, 1 << 20);
}

// A branch off a cached prefix is packed where a sequence of its own is full-precision, so here all
// begin anew; blocks leave the window in one thread while others look for blocks.
TEST(KvStep, ManyWritersGetWhatEachGetsAloneWithFullPrecisionWindow) {
  expect_writers_undisturbed("int8:sink=10,recent=40,full_precision=f16", false);
}

TEST(KvStep, TwoStepsAreOpenAtOnceButNotOfOneSequence) {
  const auto cache = created(config_of("bf16"));
  const StepEntry one{cache->create_sequence().value(), 3};
  const StepEntry two{cache->create_sequence().value(), 3};
  KvStep first(*cache);
  KvStep second(*cache);
  ASSERT_TRUE(first.begin({&one, 1}).ok());
  const Status refused = second.begin({&one, 1});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().message, "entries[0].sequence is 0; it is in another step");
  EXPECT_TRUE(second.begin({&two, 1}).ok());
  EXPECT_FALSE(cache->free_sequence(one.sequence).ok());
  EXPECT_TRUE(first.cancel().ok());
  EXPECT_TRUE(cache->free_sequence(one.sequence).ok());
}

TEST(KvStep, AStepThatIsLeftOpenIsCancelled) {
  const auto cache = created(config_of("bf16"));
  const StepEntry entry{cache->create_sequence().value(), 3};
  {
    KvStep step(*cache);
    ASSERT_TRUE(step.begin({&entry, 1}).ok());
  }
  EXPECT_EQ(cache->num_tokens(entry.sequence), 0);
  EXPECT_EQ(cache->snapshot().classes[0].num_active, 0);
}

// Layer 0 has a window and gives blocks back; layer 1, which comes later, runs out.
TEST(KvStep, APoolThatRunsOutInTheMiddleOfAStepChangesNothing) {
  KvCacheConfig config = config_of("int8", 16);
  config.geometry.layer_windows = {24, 0};
  config.max_tokens_per_sequence = 160;  // 10 blocks
  config.max_sequences = 1;
  config.memory_budget_bytes = created(config)->account().allocated.total() * 3 / 2;
  config.max_sequences = 2;
  const auto cache = created(config);
  const Stream stream(160);
  const int one = cache->create_sequence().value();
  const int two = cache->create_sequence().value();
  feed(*cache, one, stream, 0, 96, 16);
  feed(*cache, two, stream, 0, 96, 16);
  const std::vector<StepEntry> entries = {{one, 32}, {two, 32}};
  EXPECT_FALSE(cache->begin_step(entries).ok());  // now the window has let go of what it passed
  const KvCacheSnapshot before = cache->snapshot();
  ASSERT_GE(before.classes[0].num_free, 5);
  ASSERT_EQ(before.classes[1].num_free, 3);
  const Status refused = cache->begin_step(entries);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfRange);
  const KvCacheSnapshot after = cache->snapshot();
  for (size_t c = 0; c < 2; ++c) EXPECT_EQ(after.classes[c].num_free, before.classes[c].num_free);
  EXPECT_EQ(cache->num_tokens(one), 96);
  const std::vector<float> rest = feed(*cache, one, stream, 96, 144, 16);
  const auto alone = created(config);
  const int same = alone->create_sequence().value();
  feed(*alone, same, stream, 0, 96, 16);
  EXPECT_EQ(rest, feed(*alone, same, stream, 96, 144, 16));
}

// Throws in the caller's thread when it is told to.
class FailingExecutor final : public Executor {
 public:
  int num_threads() const override { return 1; }
  void parallel_for(int num_tasks, const std::function<void(int)>& task) override {
    if (fails) throw std::runtime_error("the executor fails");
    serial_executor().parallel_for(num_tasks, task);
  }
  bool fails = false;
};

TEST(KvStep, AnExecutorThatThrowsWhileBlocksMoveLeavesTheCountsRight) {
  constexpr int kMany = 1700;
  KvCacheConfig config = config_of("int8:recent=512", 512);  // a block is worth the executor
  config.cuda.reset();                                       // on a GPU none moves blocks
  config.max_tokens_per_sequence = kMany;
  FailingExecutor executor;
  auto made = KvCache::create(config, {context().kernels, &executor});
  ASSERT_TRUE(made.ok()) << made.error().message;
  KvCache& cache = *made.value();
  const Stream stream(kMany);
  const int sequence = cache.create_sequence().value();
  int at = 0;
  Status begun;
  while (begun.ok() && at < kMany) {
    const KvCacheSnapshot before = cache.snapshot();
    const int count = std::min(512, kMany - at);  // a block's
    const StepEntry entry{sequence, count};
    KvStep step(cache);
    executor.fails = true;
    begun = step.begin({&entry, 1});
    executor.fails = false;
    if (begun.ok()) {
      ASSERT_TRUE(step.cancel().ok());
      feed(step, cache, sequence, stream, at, at + count, count);
      at += count;
      continue;
    }
    EXPECT_EQ(begun.error().code, ErrorCode::kInternal);
    EXPECT_EQ(begun.error().message, "the executor fails");
    for (size_t c = 0; c < before.classes.size(); ++c) {
      EXPECT_EQ(cache.snapshot().classes[c].num_free, before.classes[c].num_free);
    }
  }
  ASSERT_LT(at, kMany) << "no block moved in the executor";
  const std::vector<float> rest = feed(cache, sequence, stream, at, kMany, kMany);
  const auto alone = created(config);
  const int same = alone->create_sequence().value();
  feed(*alone, same, stream, 0, at, kMany);
  EXPECT_EQ(rest, feed(*alone, same, stream, at, kMany, kMany));
}

}  // namespace
}  // namespace kvx::kv::kv_step_test
