// recent=N is a promise: every query has at least the N tokens before its own in full precision.
#include <gtest/gtest.h>

#include "tests/kv/stream.hpp"

namespace kvx::kv::recent_window_test {
namespace {

constexpr int kBlockSize = 16;

KvCacheConfig recent_config(int recent) {
  return config_of(fmt::format("int4:recent={},full_precision=f32", recent), kBlockSize);
}

// The first token from which on all stored keys of layer 0 are just those of the stream.
int first_exact_token(const KvCache& cache, int sequence, const Stream& stream) {
  const int64_t num_tokens = cache.num_tokens(sequence);
  const int64_t row = int64_t{kNumKvHeads} * kHeadDim;
  std::vector<float> k(static_cast<size_t>(num_tokens * row));
  const Status done = gather(cache, sequence, 0, 0, num_tokens,
                             dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim), {});
  EXPECT_TRUE(done.ok()) << done.error().message;
  int64_t first = num_tokens;
  while (first > 0 && std::equal(k.begin() + (first - 1) * row, k.begin() + first * row,
                                 stream.k.begin() + (first - 1) * row)) {
    --first;
  }
  return static_cast<int>(first);
}

TEST(RecentWindow, HoldsThePromisedTokensBeforeEveryQueryAndAtMostABlockMore) {
  const Stream stream(120);
  for (const int recent : {0, 1, 16, 17, 40}) {
    auto cache = created(recent_config(recent));
    const int sequence = cache->create_sequence().value();
    const int in_blocks = (recent + kBlockSize - 1) / kBlockSize * kBlockSize;
    for (int query = 0; query < 120; ++query) {
      feed(*cache, sequence, stream, query, query + 1, 1);
      const int first = first_exact_token(*cache, sequence, stream);
      EXPECT_LE(first, std::max(query - recent, 0)) << "recent=" << recent << ", query " << query;
      EXPECT_TRUE(first == 0 || query - first < in_blocks + kBlockSize)
          << "recent=" << recent << ", query " << query << " has tokens from " << first << " on";
    }
  }
}

// Rejected drafts: a cut that reaches no further back than the promise, whatever the length, is
// never refused, and each token that goes costs the window one at most.
TEST(RecentWindow, TakesEveryCutWithinThePromise) {
  constexpr int kRecent = 32;
  const Stream stream(200);
  for (int length = 60; length < 80; ++length) {
    for (const int cut : {1, 2, 8, kRecent, kRecent + 1}) {
      SCOPED_TRACE(testing::Message() << length << " tokens, cut by " << cut);
      auto cache = created(recent_config(kRecent));
      const int sequence = cache->create_sequence().value();
      feed(*cache, sequence, stream, 0, length, 1000);
      const Status status = cache->truncate_sequence(sequence, length - cut);
      ASSERT_TRUE(status.ok()) << status.error().message;
      const int left = length - cut;
      EXPECT_GE(left - first_exact_token(*cache, sequence, stream), kRecent + 1 - cut);
      // The window grows again with every token: after as many as went, the promise holds.
      feed(*cache, sequence, stream, left, length, 1);
      EXPECT_LE(first_exact_token(*cache, sequence, stream), length - 1 - kRecent);
    }
  }
}

TEST(RecentWindow, RefusesACutInsideABlockThatHasLeftItAndTakesOneAtItsBorder) {
  const Stream stream(100);
  auto cache = created(recent_config(32));
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 97, 1000);  // blocks 0 to 3 have left the window
  const Status refused = cache->truncate_sequence(sequence, 63);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(refused.error().message,
            "num_tokens is 63; it cuts block 3 of layer group 0, which has left the full-precision "
            "window (expected a multiple of block_size 16 or at least 64)");
  EXPECT_EQ(cache->num_tokens(sequence), 97);
  EXPECT_TRUE(cache->truncate_sequence(sequence, 64).ok());
  EXPECT_TRUE(cache->truncate_sequence(sequence, 48).ok());
}

}  // namespace
}  // namespace kvx::kv::recent_window_test
