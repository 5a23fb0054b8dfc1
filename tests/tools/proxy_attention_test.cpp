// ProxyAttention: errors of caches by layer and head, on a tiny model.
#include "tools/kvx/tune/proxy_attention.hpp"

#include <gtest/gtest.h>

#include "runner/kv_attention.hpp"
#include "tests/tools/tiny_model.hpp"

namespace kvx::tool::proxy_attention_test {
namespace {

constexpr int kTokens = 24;
constexpr int kLayers = 2;
constexpr int kHeads = 2;

class ProxyAttentionTest : public ::testing::Test {
 protected:
  std::unique_ptr<runner::KvAttention> cache(const char* recipe, const char* head_override = "") {
    runner::KvAttentionOptions options;
    options.recipe = kv::parse_recipe(recipe).value();
    if (*head_override != 0) {
      options.overrides.push_back(kv::parse_head_override(head_override).value());
    }
    options.block_size = 4;
    options.max_tokens = kTokens;
    return runner::KvAttention::create(model_->config(), options, serial_executor()).value();
  }

  // [num_layers * num_parts], of one pass in steps of 8 tokens.
  std::vector<double> errors(runner::AttentionBackend& measured, int num_parts,
                             int64_t first_measured = 0) {
    const auto base = cache("f32");
    ProxyAttention proxy(*model_, *base, {&measured}, num_parts, first_measured);
    std::vector<int> tokens;
    for (int i = 0; i < kTokens; ++i) tokens.push_back(4 + i * 7 % 26);
    for (int first = 0; first < kTokens; first += 8) {
      const auto step = std::span<const int>(tokens).subspan(first, 8);
      EXPECT_TRUE(model_->forward(step, proxy, nullptr).ok());
    }
    return proxy.errors(0);
  }

  std::unique_ptr<runner::Model> model_ = [] {
    const tests::TemporaryFile file(tests::tiny_chat_model().file());
    return runner::Model::load(file.path(), DType::kF32, serial_executor()).value();
  }();
};

TEST_F(ProxyAttentionTest, FindsNoErrorInACacheLikeTheBase) {
  const auto same = cache("f32");
  EXPECT_EQ(errors(*same, kHeads), std::vector<double>(kLayers * kHeads, 0.0));
}

// Head 1 of layer 0 alone is quantised; what it changes in later layers is no error of theirs.
TEST_F(ProxyAttentionTest, FindsTheHeadThatIsQuantised) {
  const auto one_head = cache("f32", "0:1=int4");
  const std::vector<double> found = errors(*one_head, kHeads);
  EXPECT_EQ(found[0], 0);
  EXPECT_GT(found[1], 0);
  EXPECT_EQ(found[2], 0);
  EXPECT_EQ(found[3], 0);
}

// With one head quantised nothing adds to its error: the layer's is the head's.
TEST_F(ProxyAttentionTest, GivesALayerTheErrorOfItsOnlyHead) {
  const auto one_head = cache("f32", "1:0=int4");
  const double of_head = errors(*one_head, kHeads)[2];
  const auto again = cache("f32", "1:0=int4");
  EXPECT_NEAR(errors(*again, 1)[1], of_head, 1e-6 * of_head);
}

TEST_F(ProxyAttentionTest, GrowsAsBitsBecomeFewer) {
  const auto wide = cache("int8");
  const auto narrow = cache("int4");
  const std::vector<double> of_wide = errors(*wide, kHeads);
  const std::vector<double> of_narrow = errors(*narrow, kHeads);
  for (size_t i = 0; i < of_wide.size(); ++i) EXPECT_LT(of_wide[i], of_narrow[i]) << i;
}

TEST_F(ProxyAttentionTest, LeavesOutTheTokensBeforeTheFirstMeasured) {
  const auto all = cache("int4");
  const auto none = cache("int4");
  EXPECT_GT(errors(*all, 1)[0], 0);
  EXPECT_EQ(errors(*none, 1, kTokens)[0], 0);
}

}  // namespace
}  // namespace kvx::tool::proxy_attention_test
