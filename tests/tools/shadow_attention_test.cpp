// ShadowAttention: the base answers, the shadows are measured.
#include "tools/kvx/compare/shadow_attention.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace kvx::tool::shadow_attention_test {
namespace {

constexpr int kLayers = 2;
constexpr int kRow = 2;

// Answers every query with its own q, scaled: an attention whose error is known.
class ScaledEcho : public runner::AttentionBackend {
 public:
  explicit ScaledEcho(float scale, int64_t most = 100) : scale_(scale), most_(most) {}

  int64_t num_tokens() const override { return num_tokens_; }
  int64_t max_step_tokens() const override { return most_; }
  Status begin_step(int num_tokens) override {
    open_ = num_tokens;
    return {};
  }
  Status append_and_attend(int, int num_tokens, const float* q, const float*, const float*,
                           float* out) override {
    for (int i = 0; i < num_tokens * kRow; ++i) out[i] = scale_ * q[i];
    return {};
  }
  Status end_step() override {
    num_tokens_ += open_;
    return {};
  }

 private:
  float scale_;
  int64_t most_;
  int open_ = 0;
  int64_t num_tokens_ = 0;
};

std::vector<float> step(ShadowAttention& attention, const std::vector<float>& q) {
  const int num_tokens = static_cast<int>(q.size()) / kRow;
  std::vector<float> out(q.size());
  EXPECT_TRUE(attention.begin_step(num_tokens).ok());
  for (int layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(
        attention.append_and_attend(layer, num_tokens, q.data(), q.data(), q.data(), out.data())
            .ok());
  }
  EXPECT_TRUE(attention.end_step().ok());
  return out;
}

TEST(ShadowAttention, AnswersWithTheBaseAndMeasuresTheOthers) {
  ScaledEcho base(1), same(1), larger(1.5f);
  ShadowAttention attention(base, {&same, &larger}, kLayers, kRow, kRow, 1, 0);
  EXPECT_EQ(step(attention, {1, 2, 3, 4}), (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(attention.errors(0)[1].relative_error(), 0);
  EXPECT_DOUBLE_EQ(attention.errors(1)[0].relative_error(), 0.5);
  EXPECT_DOUBLE_EQ(attention.errors(1)[1].cosine_similarity(), 1);
}

TEST(ShadowAttention, KeepsAllBackendsInStep) {
  ScaledEcho base(1, 100), shadow(1, 7);
  ShadowAttention attention(base, {&shadow}, kLayers, kRow, kRow, 1, 0);
  EXPECT_EQ(attention.max_step_tokens(), 7);
  step(attention, {1, 2});
  EXPECT_EQ(attention.num_tokens(), 1);
  EXPECT_EQ(shadow.num_tokens(), 1);
}

TEST(ShadowAttention, LeavesOutTheTokensBeforeTheFirstMeasured) {
  ScaledEcho base(1), shadow(2);
  ShadowAttention attention(base, {&shadow}, kLayers, kRow, kRow, 1, 2);
  step(attention, {1, 1});
  EXPECT_TRUE(std::isnan(attention.errors(0)[0].relative_error()));
  step(attention, {0, 0, 5, 5});  // the second token is the first measured one
  EXPECT_DOUBLE_EQ(attention.errors(0)[0].relative_error(), 1);
}

TEST(ShadowAttention, MeasuresTheHeadsOfARowApart) {
  ScaledEcho base(1), larger(1.5f);
  ShadowAttention attention(base, {&larger}, kLayers, kRow, kRow, 2, 0);
  step(attention, {1, 0, 3, 0});  // the second head's rows are zeros
  EXPECT_DOUBLE_EQ(attention.errors(0)[2].relative_error(), 0.5);
  EXPECT_TRUE(std::isnan(attention.errors(0)[3].relative_error()));
  EXPECT_EQ(attention.last_query(1)[0], 3);
}

}  // namespace
}  // namespace kvx::tool::shadow_attention_test
