// Rings: a layer that keeps a window is a full cache with a sliding window, bit for bit.
#include <gmock/gmock.h>

#include <cstring>

#include "tests/kv/contiguous_support.hpp"

namespace kvx::kv::contiguous_ring_test {
namespace {

using ::testing::HasSubstr;

constexpr int kWindow = 6;

ContiguousConfig ring_config(std::string_view recipe, int max_append) {
  ContiguousConfig config = small_config(recipe, 1000);
  config.geometry.layer_windows = {kWindow, kWindow};
  config.max_append = max_append;
  return config;
}

struct RingCase {
  const char* recipe;
  int max_append;
};

class ContiguousRing : public ::testing::TestWithParam<RingCase> {};

TEST_P(ContiguousRing, EqualsAFullCacheWithASlidingWindowInEveryChunk) {
  const auto [recipe, max_append] = GetParam();
  ContiguousCache ring = cache_of(ring_config(recipe, max_append));
  ContiguousCache full = cache_of(small_config(recipe, 100));
  EXPECT_EQ(ring.config().capacity(0), kWindow + max_append - 1);
  int position = 0;
  for (int step = 0; step < 40; ++step) {
    const int num_tokens = 1 + step % max_append;
    ASSERT_TRUE(append_all(ring, position, num_tokens).ok());
    ASSERT_TRUE(append_all(full, position, num_tokens).ok());
    position += num_tokens;
    if (position > 90) break;
    for (int layer = 0; layer < 2; ++layer) {
      const ContiguousAttention attention = {.softmax_scale = 0.3f};
      const ContiguousAttention windowed = {.softmax_scale = 0.3f, .window = kWindow};
      const auto expected = attend(full, layer, position, num_tokens, windowed);
      ASSERT_LE(relative_rms(attend(ring, layer, position, num_tokens, attention), expected), 1e-6)
          << "position " << position << ", " << num_tokens << " queries";
      ASSERT_LE(relative_rms(expected,
                             reference_attention(full, layer, position, num_tokens, 0.3f, kWindow)),
                1e-5);
    }
  }
  EXPECT_GT(position, 3 * kWindow);  // several times around
}

INSTANTIATE_TEST_SUITE_P(Formats, ContiguousRing,
                         ::testing::Values(RingCase{"f32", 1}, RingCase{"f32", 5},
                                           RingCase{"int8", 1}, RingCase{"nvfp4", 7},
                                           RingCase{"fp4_row", 1}, RingCase{"int4_row", 4},
                                           RingCase{"mxfp4", 13}));

TEST(ContiguousRing, KeepsPositionPInSlotPModuloTheWindow) {
  ContiguousCache ring = cache_of(ring_config("f32", 1));
  for (int t = 0; t < 17; ++t) ASSERT_TRUE(append_all(ring, t, 1).ok());
  const ops::SideView& side = ring.view(0).runs[0].k;
  for (int p = 17 - kWindow; p < 17; ++p) {
    const auto expected = numbers(ring.config(), 1, p, 1, 2, 32);
    float stored;
    std::memcpy(&stored, side.codes.at(1, p % kWindow, 1), sizeof stored);
    EXPECT_EQ(stored, expected[(1 * 2 + 1) * 32]) << p;
  }
}

TEST(ContiguousRing, KeepsTheLastWindowOfAWriteThatIsLonger) {
  ContiguousCache at_once = cache_of(ring_config("int4", 1));
  ContiguousCache one_by_one = cache_of(ring_config("int4", 1));
  ASSERT_TRUE(append_all(at_once, 0, 2).ok());
  ASSERT_TRUE(append_all(at_once, 2, 29).ok());
  for (int t = 0; t < 31; ++t) ASSERT_TRUE(append_all(one_by_one, t, 1).ok());
  EXPECT_EQ(at_once.seq_len(), 31);
  EXPECT_EQ(at_once.num_held(0), kWindow);
  EXPECT_EQ(gather(at_once, 0).k, gather(one_by_one, 0).k);
  EXPECT_EQ(attend(at_once, 0, 31, 1), attend(one_by_one, 0, 31, 1));
}

TEST(ContiguousRing, GathersOldestFirst) {
  ContiguousCache ring = cache_of(ring_config("f32", 1));
  for (int t = 0; t < 10; ++t) ASSERT_TRUE(append_all(ring, t, 1).ok());
  EXPECT_EQ(gather(ring, 0).k, numbers(ring.config(), 1, 10 - kWindow, kWindow, 2, 32));
}

// With just the window in memory, the first of two queries needs a token that the second one's
// append has overwritten. Attention over what is left would be wrong without a sign of it.
TEST(ContiguousRing, RefusesQueriesWhoseTokensAreOverwritten) {
  ContiguousCache ring = cache_of(ring_config("f32", 1));
  ASSERT_TRUE(append_all(ring, 0, kWindow).ok());
  EXPECT_EQ(attend(ring, 0, kWindow, kWindow).size(), 2u * kWindow * 4 * 32);  // nothing lost yet
  ASSERT_TRUE(append_all(ring, kWindow, 2).ok());
  std::vector<float> q(2 * 2 * 4 * 32), out(q.size());
  EXPECT_THAT(message_of(ring.attend(0, 2, input(q, 4, 32), output(out, 4, 32), {})),
              HasSubstr("q_len is 2; a ring of 6 tokens serves 1 queries with a window of 6"));
  EXPECT_TRUE(ring.attend(0, 2, input(q, 4, 32), output(out, 4, 32), {.window = 5}).ok());
  EXPECT_THAT(message_of(ring.attend(0, 1, input(q, 4, 32), output(out, 4, 32), {.window = 7})),
              HasSubstr("window is 7; layer 0 keeps 6"));
  EXPECT_THAT(message_of(ring.attend(0, 1, input(q, 4, 32), output(out, 4, 32), {.window = -1})),
              HasSubstr("window is -1"));
}

TEST(ContiguousRing, MixesWithLayersThatKeepEverything) {
  ContiguousConfig config = small_config("int8", 64);
  config.geometry.layer_windows = {0, kWindow};
  ContiguousCache mixed = cache_of(config);
  ContiguousCache full = cache_of(small_config("int8", 64));
  for (int t = 0; t < 30; ++t) {
    ASSERT_TRUE(append_all(mixed, t, 1).ok());
    ASSERT_TRUE(append_all(full, t, 1).ok());
  }
  EXPECT_EQ(attend(mixed, 0, 30, 1), attend(full, 0, 30, 1));
  EXPECT_LE(relative_rms(attend(mixed, 1, 30, 1), attend(full, 1, 30, 1, {.window = kWindow})),
            1e-6);
  const int64_t row = 2 * 2 * 2 * (32 + 2);  // K and V, batch, heads
  EXPECT_EQ(mixed.used_bytes(), (30 + kWindow) * row);
  EXPECT_EQ(mixed.allocated_bytes(), (64 + kWindow) * row);
  EXPECT_EQ(mixed.read_bytes_per_step(), (30 + kWindow) * row);
}

}  // namespace
}  // namespace kvx::kv::contiguous_ring_test
