// Attention sinks before a sliding window (StreamingLLM): what is seen, what is kept, what a cut, a
// fork, a prefix and a file make of it, against attention over all tokens with a mask.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "kv/files/transcode.hpp"
#include "tests/kv/stream.hpp"

namespace kvx::kv::window_sinks_test {
namespace {

using testing::HasSubstr;

constexpr int kBlockSize = 16;
constexpr int kWindow = 30;
constexpr int kSinks = 5;
constexpr int kTokens = 150;

KvCacheConfig sinks_config(std::string_view recipe, std::vector<int> windows = {0, kWindow},
                           std::vector<int> sinks = {0, kSinks}) {
  KvCacheConfig config = config_of(recipe, kBlockSize);
  config.geometry.layer_windows = std::move(windows);
  config.geometry.layer_sinks = std::move(sinks);
  config.max_sequences = 3;
  config.prefix.is_on = true;
  return config;
}

std::vector<int32_t> token_ids(int count) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(i);
  return ids;
}

// Tokens [first, last) through both layers; the second one's output, whose window has sinks.
std::vector<float> feed_window(KvCache& cache, int sequence, const Stream& stream, int first,
                               int last, int step_tokens) {
  KvStep step(cache);
  return feed(step, cache, sequence, stream, first, last, step_tokens, /*read_layer=*/1);
}

// Attention of token t's query over [0, kSinks) and (t - kWindow, t], in double.
std::vector<float> masked_attention(const Stream& stream, int first, int last) {
  std::vector<float> out;
  for (int t = first; t < last; ++t) {
    for (int head = 0; head < kNumQHeads; ++head) {
      const int kv_head = head / (kNumQHeads / kNumKvHeads);
      const float* q = &stream.q[(static_cast<size_t>(t) * kNumQHeads + head) * kHeadDim];
      std::vector<double> sums(kHeadDim, 0);
      double total = 0;
      for (int s = 0; s <= t; ++s) {
        if (s >= kSinks && s <= t - kWindow) continue;
        const size_t at = (static_cast<size_t>(s) * kNumKvHeads + kv_head) * kHeadDim;
        double score = 0;
        for (int d = 0; d < kHeadDim; ++d) score += double{q[d]} * stream.k[at + d];
        const double weight = std::exp(0.125 * score);
        total += weight;
        for (int d = 0; d < kHeadDim; ++d) sums[d] += weight * stream.v[at + d];
      }
      for (const double sum : sums) out.push_back(static_cast<float>(sum / total));
    }
  }
  return out;
}

TEST(WindowSinks, AreSeenByEveryQueryBesideItsWindow) {
  const Stream stream(kTokens);
  const std::vector<float> expected = masked_attention(stream, 0, kTokens);
  for (const int step : {1, 7, 64, 1000}) {
    auto cache = created(sinks_config("f32"));
    const int sequence = cache->create_sequence().value();
    EXPECT_LT(relative_rms(feed_window(*cache, sequence, stream, 0, kTokens, step), expected), 1e-5)
        << step;
  }
  for (const char* recipe : {"int8", "int8:sink=1,recent=20"}) {
    auto cache = created(sinks_config(recipe));
    const int sequence = cache->create_sequence().value();
    EXPECT_LT(relative_rms(feed_window(*cache, sequence, stream, 0, kTokens, 8), expected), 0.02)
        << recipe;
  }
}

TEST(WindowSinks, StayWhenTheWindowHasLeftThem) {
  const Stream stream(kTokens);
  for (const char* recipe : {"int8", "int4:sink=1,recent=40"}) {
    auto cache = created(sinks_config(recipe, {kWindow, kWindow}, {kSinks, kSinks}));
    const int sequence = cache->create_sequence().value();
    feed_window(*cache, sequence, stream, 0, kTokens, 1);
    int64_t num_active = 0;
    for (const auto& one : cache->snapshot().classes) num_active += one.num_active;
    // Of the ten blocks the first, and those from token 149 - 30 + 1 = 120 on: 7, 8, 9.
    EXPECT_EQ(num_active, 4) << recipe;
    EXPECT_EQ(cache->sequence_bytes(kTokens - 1).total(), [&] {
      int64_t bytes = 0;
      for (const auto& one : cache->snapshot().classes) {
        bytes += one.num_active * one.block_bytes;
      }
      return bytes;
    }()) << recipe;
    std::vector<float> rows(static_cast<size_t>(kSinks) * kNumKvHeads * kHeadDim);
    const auto k = dense_rows(static_cast<void*>(rows.data()), DType::kF32, kNumKvHeads, kHeadDim);
    EXPECT_TRUE(gather(*cache, sequence, 1, 0, kSinks, k, {}).ok());
    EXPECT_FALSE(gather(*cache, sequence, 1, 32, kSinks, k, {}).ok()) << "these are gone";
  }
}

TEST(WindowSinks, CutsAndForksGoOnAsIfTheyHadNeverBeen) {
  const Stream stream(kTokens);
  for (const char* recipe : {"bf16", "nvfp4:immediate", "int4:sink=1,recent=40"}) {
    auto cache = created(sinks_config(recipe));
    const int sequence = cache->create_sequence().value();
    feed_window(*cache, sequence, stream, 0, 100, 1);
    const int fork = cache->fork_sequence(sequence).value();
    const std::vector<float> plain = feed_window(*cache, sequence, stream, 100, 140, 1);
    EXPECT_EQ(feed_window(*cache, fork, stream, 100, 140, 1), plain) << recipe;
    ASSERT_TRUE(cache->truncate_sequence(sequence, 139).ok());
    feed_window(*cache, sequence, stream, 139, 140, 1);
    EXPECT_FALSE(cache->truncate_sequence(sequence, 70).ok()) << "its window is gone";
    // All that a sequence of 10 tokens reads is in the sinks' block.
    ASSERT_TRUE(cache->truncate_sequence(fork, 16).ok());
    auto own = created(sinks_config(recipe));
    const int fresh = own->create_sequence().value();
    feed_window(*own, fresh, stream, 0, 16, 1);
    EXPECT_EQ(feed_window(*cache, fork, stream, 16, 60, 1),
              feed_window(*own, fresh, stream, 16, 60, 1))
        << recipe;
  }
}

TEST(WindowSinks, APrefixNeedsTheSinksAndTheWindow) {
  const Stream stream(kTokens);
  for (const char* recipe : {"bf16", "int8:sink=1,recent=20"}) {
    auto cache = created(sinks_config(recipe));
    const int sequence = cache->create_sequence().value();
    feed_window(*cache, sequence, stream, 0, 112, 1);
    ASSERT_TRUE(cache->record_tokens(sequence, token_ids(112)).ok());
    const int begun = cache->create_sequence_from({}, token_ids(113)).value();
    ASSERT_EQ(cache->num_tokens(begun), 112) << recipe;
    const std::vector<float> found = feed_window(*cache, begun, stream, 112, kTokens, 1);
    EXPECT_EQ(found, feed_window(*cache, sequence, stream, 112, kTokens, 1)) << recipe;
  }
}

TEST(WindowSinks, GoToAFileAndComeBack) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("kvx_sinks_" + std::to_string(getpid()))).string();
  const Stream stream(kTokens);
  for (const char* recipe : {"bf16", "int4:sink=1,recent=40"}) {
    auto cache = created(sinks_config(recipe));
    const int sequence = cache->create_sequence().value();
    feed_window(*cache, sequence, stream, 0, 107, 1);
    ASSERT_TRUE(cache->record_tokens(sequence, token_ids(107)).ok());
    ASSERT_TRUE(cache->save_sequence(sequence, path).ok());
    auto other = created(sinks_config(recipe));
    const auto loaded = other->load_sequence(path);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    auto transcoded = created(sinks_config("f32"));
    const auto converted = transcode_sequence(*transcoded, path);
    ASSERT_TRUE(converted.ok()) << converted.error().message;
    const std::vector<float> expected = feed_window(*cache, sequence, stream, 107, kTokens, 1);
    EXPECT_EQ(feed_window(*other, loaded.value(), stream, 107, kTokens, 1), expected) << recipe;
    EXPECT_LT(relative_rms(feed_window(*transcoded, converted.value(), stream, 107, kTokens, 1),
                           expected),
              0.2)
        << recipe;
    EXPECT_THAT(
        created(sinks_config(recipe, {0, kWindow}, {0, 6}))->load_sequence(path).error().message,
        HasSubstr("window 30 sinks 5"));
  }
  std::filesystem::remove(path);
}

TEST(WindowSinks, BelongToALayerWithAWindow) {
  const auto error_of = [](std::vector<int> windows, std::vector<int> sinks) {
    const auto cache =
        KvCache::create(sinks_config("bf16", std::move(windows), std::move(sinks)), context());
    EXPECT_FALSE(cache.ok());
    return cache.ok() ? "" : cache.error().message;
  };
  EXPECT_THAT(error_of({0, 30}, {4, 4}), HasSubstr("layer_sinks[0] is 4 with a window of 0"));
  EXPECT_THAT(error_of({0, 30}, {0, -1}), HasSubstr("layer_sinks[1] is -1"));
  EXPECT_THAT(error_of({0, 30}, {4}), HasSubstr("layer_sinks has 1 entries"));
}

}  // namespace
}  // namespace kvx::kv::window_sinks_test
