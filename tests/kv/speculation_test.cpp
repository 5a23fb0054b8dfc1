// Speculative steps where pages share scales and append is immediate: whatever of them goes again,
// what is left is bit for bit as if it had never come. By cases, and by random histories against a
// model: the runs of tokens that each sequence still has, fed to a cache of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <map>

#include "tests/kv/stream.hpp"

namespace kvx::kv::speculation_test {
namespace {

using testing::HasSubstr;

constexpr int kBlockSize = 16;
constexpr int kMaxSpeculative = 24;
constexpr int kWindow = 80;  // of the second layer
constexpr const char* kRecipes[] = {"int8:source=page,immediate",
                                    "int8:g32,scale=f32,source=page,immediate"};

KvCacheConfig page_config(std::string_view recipe, int max_sequences = 2) {
  KvCacheConfig config = config_of(recipe, kBlockSize);
  config.overrides = {parse_head_override("0:1=int4").value()};  // beside scales of rows
  config.geometry.layer_windows = {0, kWindow};
  config.max_sequences = max_sequences;
  config.max_tokens_per_sequence = 112;
  config.max_speculative_tokens = kMaxSpeculative;
  config.prefix.is_on = true;
  return config;
}

// Rows whose size goes up and down, so that a page's scale grows often.
Stream loud_stream(int num_tokens, uint32_t seed) {
  Stream stream(num_tokens, seed);
  std::mt19937 random(seed + 1);
  for (std::vector<float>* side : {&stream.k, &stream.v}) {
    const size_t width = static_cast<size_t>(kNumKvHeads) * kHeadDim;
    for (size_t row = 0; row < side->size() / width; ++row) {
      const float loudness = static_cast<float>(1 + random() % 8);
      for (size_t i = 0; i < width; ++i) (*side)[row * width + i] *= loudness;
    }
  }
  return stream;
}

// A run of tokens that came in one step: the sequence's next ones, of this stream.
struct Chunk {
  const Stream* stream = nullptr;
  int first = 0;
  int count = 0;
  int32_t first_id = 0;  // of its tokens, as they are recorded

  int end() const { return first + count; }
};

// Appends a run; the step is left open.
void write_run(const KvCache& cache, KvStep& step, int sequence, const Chunk& run,
               bool is_speculative) {
  const StepEntry entry{sequence, run.count, is_speculative};
  const Status begun = step.begin({&entry, 1});
  ASSERT_TRUE(begun.ok()) << begun.error().message;
  const Stream& stream = *run.stream;
  for (int layer = 0; layer < kNumLayers; ++layer) {
    ASSERT_TRUE(append(cache, step, run.count, layer, stream.rows(stream.k, kNumKvHeads, run.first),
                       stream.rows(stream.v, kNumKvHeads, run.first))
                    .ok());
  }
}

void append_run(KvCache& cache, int sequence, const Chunk& run, bool is_speculative = false) {
  KvStep step(cache);
  write_run(cache, step, sequence, run, is_speculative);
  ASSERT_TRUE(step.end().ok());
}

// K and V of what the layers' windows still hold of the sequence, as numbers.
std::vector<float> rows_of(const KvCache& cache, int sequence) {
  std::vector<float> all;
  const int64_t num_tokens = cache.num_tokens(sequence);
  for (int layer = 0; layer < kNumLayers; ++layer) {
    const int64_t first = layer == 0 ? 0 : std::max<int64_t>(num_tokens - kWindow + 1, 0);
    const auto count = static_cast<size_t>(num_tokens - first);
    std::vector<float> k(count * kNumKvHeads * kHeadDim), v(k.size());
    const Status done = gather(cache, sequence, layer, first, num_tokens - first,
                               dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim),
                               dense_rows(v.data(), DType::kF32, kNumKvHeads, kHeadDim));
    EXPECT_TRUE(done.ok()) << done.error().message;
    all.insert(all.end(), k.begin(), k.end());
    all.insert(all.end(), v.begin(), v.end());
  }
  return all;
}

// In a cache of their own on the host, whose bytes are those of any other place.
std::vector<float> rows_of_runs(std::string_view recipe, const std::vector<Chunk>& runs) {
  KvCacheConfig config = page_config(recipe);
  config.cuda.reset();
  auto cache = created(std::move(config));
  const int sequence = cache->create_sequence().value();
  for (const Chunk& run : runs) append_run(*cache, sequence, run);
  return rows_of(*cache, sequence);
}

// The first num_tokens of the runs.
std::vector<Chunk> cut(std::vector<Chunk> runs, int num_tokens) {
  int end = 0;
  std::vector<Chunk> kept;
  for (Chunk run : runs) {
    run.count = std::min(run.count, num_tokens - end);
    end += run.count;
    if (run.count > 0) kept.push_back(run);
  }
  return kept;
}

TEST(Speculation, ACutAnywhereInItIsBitwiseAsIfTheRestHadNeverCome) {
  const Stream stream = loud_stream(112, 1), other = loud_stream(112, 2);
  for (const char* recipe : kRecipes) {
    for (const int start : {0, 5, 16, 31, 45}) {
      std::vector<Chunk> runs;
      if (start > 0) runs.push_back({&stream, 0, start});
      const size_t num_firm = runs.size();
      for (const auto& [first, count] : {std::pair{0, 3}, {3, 1}, {4, 14}, {18, 6}}) {
        runs.push_back({&stream, start + first, count});
      }
      for (int kept = 0; kept <= kMaxSpeculative; ++kept) {
        SCOPED_TRACE(fmt::format("{}, {} of {} from {}", recipe, kept, kMaxSpeculative, start));
        auto cache = created(page_config(recipe));
        const int sequence = cache->create_sequence().value();
        for (size_t i = 0; i < runs.size(); ++i) {
          append_run(*cache, sequence, runs[i], i >= num_firm);
        }
        const Status status = cache->truncate_sequence(sequence, start + kept);
        ASSERT_TRUE(status.ok()) << status.error().message;
        std::vector<Chunk> left = cut(runs, start + kept);
        ASSERT_EQ(rows_of(*cache, sequence), rows_of_runs(recipe, left));
        left.push_back({&other, start + kept, 20});
        append_run(*cache, sequence, left.back());
        ASSERT_EQ(rows_of(*cache, sequence), rows_of_runs(recipe, left));
      }
    }
  }
}

TEST(Speculation, PartOfAStepIsKeptBitForBitAndTheRestOfItsPageIsFree) {
  const Stream stream = loud_stream(60, 3);
  for (const char* recipe : kRecipes) {
    for (int kept = 0; kept <= 9; ++kept) {
      auto cache = created(page_config(recipe));
      const int sequence = cache->create_sequence().value();
      std::vector<Chunk> runs = {{&stream, 0, 28}, {&stream, 28, 9}};
      append_run(*cache, sequence, runs[0]);
      KvStep step(*cache);
      write_run(*cache, step, sequence, runs[1], true);
      ASSERT_TRUE(step.end({&kept, 1}).ok());
      ASSERT_EQ(rows_of(*cache, sequence), rows_of_runs(recipe, cut(runs, 28 + kept)));
      ASSERT_TRUE(cache->free_sequence(sequence).ok());
      for (const auto& one : cache->snapshot().classes) EXPECT_EQ(one.num_active, 0);
    }
  }
}

TEST(Speculation, ACancelledStepLeavesTheTokensBeforeItAsTheyWere) {
  const Stream stream = loud_stream(60, 4);
  const char* recipe = kRecipes[0];
  auto cache = created(page_config(recipe));
  const int sequence = cache->create_sequence().value();
  const std::vector<Chunk> runs = {{&stream, 0, 20}, {&stream, 20, 3}};
  append_run(*cache, sequence, runs[0]);
  append_run(*cache, sequence, runs[1], true);
  KvStep step(*cache);
  write_run(*cache, step, sequence, {&stream, 23, 12}, true);
  ASSERT_TRUE(step.cancel().ok());
  EXPECT_EQ(rows_of(*cache, sequence), rows_of_runs(recipe, runs));
  ASSERT_TRUE(cache->truncate_sequence(sequence, 21).ok()) << "what came before can still go";
  EXPECT_EQ(rows_of(*cache, sequence), rows_of_runs(recipe, cut(runs, 21)));
}

// Layers may bring rows of different types; what is written again is read as it came.
TEST(Speculation, EveryLayersRowsComeBackInTheirOwnType) {
  const Stream stream = loud_stream(60, 9);
  const auto as_bf16 = [](const std::vector<float>& rows) {
    std::vector<uint16_t> words;
    for (const float x : rows)
      words.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16));
    return words;
  };
  const std::vector<uint16_t> k = as_bf16(stream.k), v = as_bf16(stream.v);
  const auto write = [&](const KvCache& cache, KvStep& step, int sequence, int first, int count,
                         bool is_speculative) {
    const StepEntry entry{sequence, count, is_speculative};
    ASSERT_TRUE(step.begin({&entry, 1}).ok());
    const auto halves = [&](const std::vector<uint16_t>& from) {
      return dense_rows(static_cast<const void*>(from.data() + first * kNumKvHeads * kHeadDim),
                        DType::kBF16, kNumKvHeads, kHeadDim);
    };
    ASSERT_TRUE(append(cache, step, count, 0, stream.rows(stream.k, kNumKvHeads, first),
                       stream.rows(stream.v, kNumKvHeads, first))
                    .ok());
    ASSERT_TRUE(append(cache, step, count, 1, halves(k), halves(v)).ok());
  };
  std::vector<float> rows[2];
  for (const bool cuts : {false, true}) {
    auto cache = created(page_config(kRecipes[0]));
    const int sequence = cache->create_sequence().value();
    KvStep step(*cache);
    write(*cache, step, sequence, 0, 20, false);
    ASSERT_TRUE(step.end().ok());
    write(*cache, step, sequence, 20, cuts ? 6 : 3, true);
    const int kept = 3;
    ASSERT_TRUE((cuts ? step.end({&kept, 1}) : step.end()).ok());
    rows[cuts ? 1 : 0] = rows_of(*cache, sequence);
  }
  EXPECT_EQ(rows[0], rows[1]);
}

TEST(Speculation, AForkNeverSeesTheCut) {
  const Stream stream = loud_stream(60, 5);
  const char* recipe = kRecipes[0];
  auto cache = created(page_config(recipe));
  const int sequence = cache->create_sequence().value();
  const std::vector<Chunk> runs = {{&stream, 0, 20}, {&stream, 20, 7}};
  append_run(*cache, sequence, runs[0]);
  append_run(*cache, sequence, runs[1], true);
  const int fork = cache->fork_sequence(sequence).value();
  ASSERT_TRUE(cache->truncate_sequence(sequence, 22).ok());
  EXPECT_EQ(rows_of(*cache, sequence), rows_of_runs(recipe, cut(runs, 22)));
  EXPECT_EQ(rows_of(*cache, fork), rows_of_runs(recipe, runs));
}

TEST(Speculation, SaysWhatIsFirmAndWhatItNeeds) {
  const Stream stream = loud_stream(112, 6);
  auto cache = created(page_config(kRecipes[0]));
  const int sequence = cache->create_sequence().value();
  append_run(*cache, sequence, {&stream, 0, 20});
  append_run(*cache, sequence, {&stream, 20, 5}, true);
  EXPECT_THAT(cache->truncate_sequence(sequence, 19).error().message,
              HasSubstr("inside a page whose shared scale may have grown"));
  const StepEntry too_many{sequence, 20, true};
  EXPECT_THAT(KvStep(*cache).begin({&too_many, 1}).error().message,
              HasSubstr("20 speculative tokens after 5 others; expected at most "
                        "max_speculative_tokens, 24"));
  append_run(*cache, sequence, {&stream, 25, 1});  // now all of it is firm
  EXPECT_FALSE(cache->truncate_sequence(sequence, 24).ok());

  KvCacheConfig config = page_config(kRecipes[0]);
  config.max_speculative_tokens = 0;
  cache = created(config);
  const int other = cache->create_sequence().value();
  const StepEntry entry{other, 1, true};
  EXPECT_THAT(KvStep(*cache).begin({&entry, 1}).error().message,
              HasSubstr("expected max_speculative_tokens of the cache above 0"));
  config.max_speculative_tokens = -1;
  EXPECT_THAT(KvCache::create(config, context()).error().message,
              HasSubstr("max_speculative_tokens is -1"));
}

// ---- random histories

class History {
 public:
  History(std::string_view recipe, uint32_t seed) : recipe_(recipe), random_(seed) {
    for (uint32_t i = 0; i < 3; ++i) streams_.push_back(loud_stream(112, 100 * seed + i));
    KvCacheConfig config = page_config(recipe, kNumSequences);
    config.memory_budget_bytes = created(config)->account().allocated.total() / 2;
    cache_ = created(std::move(config));
  }

  void step() {
    const int s = between(0, kNumSequences - 1);
    if (!sequences_.contains(s)) return begin();
    auto it = sequences_.find(s);
    switch (between(0, 11)) {
      case 0:
        return end(it->first);
      case 1:
        return fork(it->first);
      case 2:
      case 3:
        return truncate(it->first);
      case 4:
        return record(it->first);
      default:
        return append(it->first);
    }
  }

  void check() {
    for (const auto& [sequence, runs] : sequences_) {
      ASSERT_EQ(rows_of(*cache_, sequence), rows_of_runs(recipe_, runs));
    }
    if (sequences_.empty()) {
      for (const auto& one : cache_->snapshot().classes) ASSERT_EQ(one.num_active, 0);
    }
  }
  int num_cuts() const { return num_cuts_; }

 private:
  static constexpr int kNumSequences = 4;

  int between(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<uint32_t>(high - low + 1));
  }

  void begin() {
    const auto created = cache_->create_sequence();
    if (created.ok()) sequences_[created.value()] = {};
  }
  void end(int sequence) {
    ASSERT_TRUE(cache_->free_sequence(sequence).ok());
    sequences_.erase(sequence);
  }
  void fork(int sequence) {
    const auto fork = cache_->fork_sequence(sequence);
    if (fork.ok()) sequences_[fork.value()] = sequences_[sequence];
  }
  // Whole or in part, in one step; a pool that has no room changes nothing.
  void append(int sequence) {
    std::vector<Chunk>& runs = sequences_[sequence];
    const auto before = static_cast<int>(cache_->num_tokens(sequence));
    const int count = std::min(between(1, 12), 112 - before);
    if (count == 0) return;
    const Chunk run{&streams_[between(0, 2)], before, count, next_id_};
    next_id_ += count;
    const StepEntry entry{sequence, count, between(0, 2) > 0};
    KvStep step(*cache_);
    if (!step.begin({&entry, 1}).ok()) return;
    for (int layer = 0; layer < kNumLayers; ++layer) {
      ASSERT_TRUE(kv::append(*cache_, step, count, layer,
                             run.stream->rows(run.stream->k, kNumKvHeads, before),
                             run.stream->rows(run.stream->v, kNumKvHeads, before))
                      .ok());
    }
    const int kept = between(0, 2) == 0 ? between(0, count) : count;
    if (kept < count && entry.is_speculative && between(0, 3) == 0) {
      ASSERT_TRUE(step.cancel().ok());
      return;
    }
    const Status ended = kept < count ? step.end({&kept, 1}) : step.end();
    if (!ended.ok()) {  // it cuts a page that was not kept
      ASSERT_TRUE(step.end().ok());
    }
    runs.push_back(run);
    if (ended.ok()) runs = cut(runs, before + kept);
    num_cuts_ += ended.ok() && kept < count;
  }
  void truncate(int sequence) {
    const auto before = static_cast<int>(cache_->num_tokens(sequence));
    const int left = std::max(before - between(0, 20), 0);
    if (!cache_->truncate_sequence(sequence, left).ok()) return;
    sequences_[sequence] = cut(sequences_[sequence], left);
    ++num_cuts_;
  }
  // Blocks of recorded tokens are kept: they are never written again.
  void record(int sequence) {
    const auto num_recorded = static_cast<int>(cache_->recorded_tokens(sequence).size());
    std::vector<int32_t> ids;
    for (const Chunk& run : sequences_[sequence]) {
      for (int token = std::max(run.first, num_recorded); token < run.end(); ++token) {
        ids.push_back(run.first_id + token - run.first);
      }
    }
    ASSERT_TRUE(cache_->record_tokens(sequence, ids).ok());
  }

  std::string recipe_;
  std::mt19937 random_;
  std::vector<Stream> streams_;
  std::unique_ptr<KvCache> cache_;
  std::map<int, std::vector<Chunk>> sequences_;
  int32_t next_id_ = 0;
  int num_cuts_ = 0;
};

// KVX_TEST_FULL=1: 125 times as long.
TEST(Speculation, FollowsItsModel) {
  const char* full = std::getenv("KVX_TEST_FULL");
  const int num_steps = full != nullptr && std::string_view(full) != "0" ? 10'000 : 80;
  for (const char* recipe : kRecipes) {
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      SCOPED_TRACE(fmt::format("{}, seed {}", recipe, seed));
      History history(recipe, seed);
      for (int i = 0; i < num_steps && !testing::Test::HasFatalFailure(); ++i) {
        history.step();
        history.check();
      }
      EXPECT_GT(history.num_cuts(), num_steps / 20);
    }
  }
}

}  // namespace
}  // namespace kvx::kv::speculation_test
