// Block offsets from a mean before RoPE, against rotations computed one position at a time.
#include "kv/plan/rope_offsets.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace kvx::kv {
namespace {

using testing::HasSubstr;

Rope llama_rope(int rotary_dims, RopePairs pairs) {
  Rope rope;
  rope.pairs = pairs;
  for (int i = 0; i < rotary_dims / 2; ++i) {
    rope.inv_freq.push_back(std::pow(10000.0, -2.0 * i / rotary_dims));
  }
  return rope;
}

std::vector<float> a_mean(int count) {
  std::vector<float> mean;
  for (int i = 0; i < count; ++i) mean.push_back(std::sin(1.7f * static_cast<float>(i)) * 3);
  return mean;
}

// The mean over a block's positions of the rotated row, by libm.
std::vector<double> expected_offset(const Rope& rope, const float* mean, int head_dim,
                                    int64_t first, int count) {
  std::vector<double> sum(head_dim, 0.0);
  const int n = static_cast<int>(rope.inv_freq.size());
  for (int64_t j = first; j < first + count; ++j) {
    for (int i = 0; i < n; ++i) {
      const int a = rope.pairs == RopePairs::kHalves ? i : 2 * i;
      const int b = rope.pairs == RopePairs::kHalves ? i + n : 2 * i + 1;
      const double angle = static_cast<double>(j) * rope.inv_freq[i];
      const double scale = rope.attention_scaling / count;
      sum[a] += (std::cos(angle) * mean[a] - std::sin(angle) * mean[b]) * scale;
      sum[b] += (std::sin(angle) * mean[a] + std::cos(angle) * mean[b]) * scale;
    }
    for (int d = 2 * n; d < head_dim; ++d) sum[d] += static_cast<double>(mean[d]) / count;
  }
  return sum;
}

void expect_offsets(const Rope& rope, int head_dim, int block_size, int64_t num_blocks,
                    int64_t step) {
  constexpr int kHeads = 2;
  const std::vector<float> mean = a_mean(kHeads * head_dim);
  const std::vector<float> offsets =
      rope_block_offsets(rope, mean, kHeads, head_dim, block_size, num_blocks);
  ASSERT_EQ(offsets.size(), static_cast<size_t>(num_blocks * kHeads * head_dim));
  for (int64_t block = 1; block < num_blocks; block += step) {
    for (int head = 0; head < kHeads; ++head) {
      const std::vector<double> expected = expected_offset(
          rope, mean.data() + head * head_dim, head_dim, block * block_size, block_size);
      for (int d = 0; d < head_dim; ++d) {
        const float found = offsets[(block * kHeads + head) * head_dim + d];
        ASSERT_NEAR(found, expected[d], 1e-6)
            << "block " << block << " head " << head << " dim " << d;
      }
    }
  }
}

TEST(RopeOffsets, AreTheMeanOfABlocksRotations) {
  expect_offsets(llama_rope(64, RopePairs::kHalves), 64, 16, 10, 1);
  expect_offsets(llama_rope(64, RopePairs::kInterleaved), 64, 16, 10, 1);
}

TEST(RopeOffsets, StayExactAtALongContextsEnd) {
  expect_offsets(llama_rope(64, RopePairs::kHalves), 64, 64, 16384, 3001);  // 1 M tokens
}

TEST(RopeOffsets, LeaveNumbersThatDoNotRotateAndScaleThoseThatDo) {
  Rope rope = llama_rope(32, RopePairs::kHalves);
  rope.attention_scaling = 1.25;
  rope.inv_freq.front() = 3.0;  // more than half a turn a position
  rope.inv_freq.back() = 0.0;
  expect_offsets(rope, 48, 8, 20, 1);
}

TEST(RopeOffsets, AreZeroInTheFirstBlock) {
  const std::vector<float> offsets =
      rope_block_offsets(llama_rope(8, RopePairs::kHalves), a_mean(12), 1, 12, 4, 3);
  EXPECT_THAT(std::vector<float>(offsets.begin(), offsets.begin() + 12), testing::Each(0.0f));
}

TEST(RopeOffsets, OfAShorterCacheAreTheFirstOfALonger) {
  const Rope rope = llama_rope(16, RopePairs::kInterleaved);
  const std::vector<float> mean = a_mean(16);
  const std::vector<float> some = rope_block_offsets(rope, mean, 1, 16, 8, 5);
  std::vector<float> more = rope_block_offsets(rope, mean, 1, 16, 8, 50);
  more.resize(some.size());
  EXPECT_EQ(some, more);
}

std::string message(const Rope& rope) {
  const Status status = check_rope("layer 2 k_rope", rope, 64);
  return status.ok() ? "accepted" : status.error().message;
}

TEST(RopeOffsets, ARopeThatCannotBeIsNamed) {
  Rope rope = llama_rope(64, RopePairs::kHalves);
  EXPECT_EQ(message(rope), "accepted");
  EXPECT_THAT(message({}), HasSubstr("layer 2 k_rope inv_freq has 0 numbers; expected 1 to"));
  rope.inv_freq.resize(33);
  EXPECT_THAT(message(rope),
              HasSubstr("inv_freq has 33 numbers; expected 1 to k_head_dim / 2, 32"));
  rope.inv_freq.resize(32);
  rope.inv_freq[5] = -0.5;
  EXPECT_THAT(message(rope), HasSubstr("inv_freq[5] is -0.5; expected 0 to pi"));
  rope.inv_freq[5] = std::nan("");
  EXPECT_THAT(message(rope), HasSubstr("inv_freq[5] is nan"));
  rope.inv_freq[5] = 0.5;
  rope.attention_scaling = 0;
  EXPECT_THAT(message(rope), HasSubstr("attention_scaling is 0; expected a positive"));
}

}  // namespace
}  // namespace kvx::kv
