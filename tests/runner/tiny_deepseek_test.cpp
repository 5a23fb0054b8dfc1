// Latent attention and experts on a tiny model: logits against Python's doubles, which expand what
// the cache holds as latent rows, and what a bad file is refused for.
#include "tests/runner/tiny_deepseek.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runner/collecting_attention.hpp"
#include "runner/experts.hpp"
#include "runner/kv_attention.hpp"
#include "runner/model.hpp"
#include "tests/runner/forward_pass.hpp"
#include "tests/runner/golden_file.hpp"
#include "tests/runner/tiny_llama.hpp"

namespace kvx::runner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::all_logits;
using tests::load;

std::unique_ptr<KvAttention> attention_of(const Model& model, const char* recipe) {
  KvAttentionOptions options;
  options.recipe = kv::parse_recipe(recipe).value();
  options.block_size = 4;
  options.max_tokens = 16;
  auto attention = KvAttention::create(model.config(), options, serial_executor());
  if (!attention.ok()) throw std::runtime_error(attention.error().message);
  return std::move(attention).value();
}

class TinyDeepseek : public testing::TestWithParam<int> {
 protected:
  TinyDeepseek() : golden_(tests::golden_cases("tiny_deepseek").at(GetParam())) {
    auto loaded = load(tests::tiny_deepseek(golden_.at("extras")));
    if (!loaded.ok()) throw std::runtime_error(loaded.error().message);
    model_ = std::move(loaded).value();
    tokens_ = golden_.at("tokens").get<std::vector<int>>();
  }

  void expect_golden(const std::vector<float>& logits, size_t first_token, double tolerance) const {
    const int vocab = model_->config().vocab_size;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double expected = golden_.at("logits").at(first_token + i / vocab).at(i % vocab);
      ASSERT_NEAR(logits[i], expected, tolerance)
          << "token " << first_token + i / vocab << ", logit " << i % vocab;
    }
  }

  nlohmann::json golden_;
  std::unique_ptr<Model> model_;
  std::vector<int> tokens_;
};

TEST_P(TinyDeepseek, HasTheLogitsOfTheDefinition) {
  const auto attention = attention_of(*model_, "f32");
  expect_golden(all_logits(*model_, *attention, tokens_), 0, 5e-6);
  EXPECT_EQ(attention->cache().config().geometry.k_head_dim, 12);
  EXPECT_TRUE(attention->cache().config().geometry.is_latent);
}

TEST_P(TinyDeepseek, HasThemTokenByToken) {
  const auto attention = attention_of(*model_, "f32");
  for (size_t t = 0; t < tokens_.size(); ++t) {
    expect_golden(all_logits(*model_, *attention, {&tokens_[t], 1}), t, 5e-6);
  }
}

TEST_P(TinyDeepseek, StaysNearThemInPackedRows) {
  for (const char* recipe : {"bf16", "int8+bf16", "int4+bf16:sink=4,recent=4"}) {
    const auto attention = attention_of(*model_, recipe);
    expect_golden(all_logits(*model_, *attention, tokens_), 0, 0.05);
  }
}

TEST_P(TinyDeepseek, CollectsNoTables) {
  EXPECT_THAT(make_statistics(model_->config()).error().message, HasSubstr("latent rows"));
}

INSTANTIATE_TEST_SUITE_P(Golden, TinyDeepseek, testing::Values(0, 1));

TEST(DeepseekConfig, RefusesWhatTheRunnerCannotCompute) {
  const auto error_of = [](const std::string& key, uint32_t value) {
    const auto model = load(tests::tiny_deepseek(true, {{key, value}}));
    return model.ok() ? "accepted" : model.error().message;
  };
  EXPECT_THAT(error_of("expert_gating_func", 7),
              HasSubstr("deepseek2.expert_gating_func is 7; expected 1 (softmax) or 2 (sigmoid)"));
  EXPECT_THAT(error_of("rope.dimension_count", 3),
              HasSubstr("deepseek2.rope.dimension_count is 3; an even number below"));
  EXPECT_THAT(error_of("rope.dimension_count", 10),
              HasSubstr("deepseek2.rope.dimension_count is 10; an even number below"));
  EXPECT_THAT(error_of("expert_used_count", 3), HasSubstr("deepseek2.expert_group_count is 2"));
  EXPECT_THAT(error_of("expert_group_count", 3), HasSubstr("deepseek2.expert_group_count is 3"));
  EXPECT_THAT(error_of("rope.scaling.original_context_length", 0),
              HasSubstr("deepseek2.rope.scaling.original_context_length"));
  EXPECT_THAT(error_of("attention.kv_lora_rank", 9),
              HasSubstr("tensor blk.0.attn_kv_a_mqa.weight is [16, 12]; [16, 13] was expected"));
}

TEST(ChooseExperts, TakesTheBestOfTheBestGroups) {
  const auto numbers = [](const std::vector<ChosenExpert>& chosen) {
    std::vector<int> experts;
    for (const ChosenExpert& one : chosen) experts.push_back(one.expert);
    return experts;
  };
  ExpertSizes sizes;
  sizes.num_experts = 4;
  sizes.num_used = 2;
  const std::vector<float> logits = {1.0f, 3.0f, 2.9f, 2.8f};
  EXPECT_THAT(numbers(choose_experts(sizes, logits, {})), ElementsAre(1, 2));
  sizes.num_groups = 2;
  sizes.num_used_groups = 1;
  EXPECT_THAT(numbers(choose_experts(sizes, logits, {})), ElementsAre(1, 0)) << "by the best one";
  sizes.has_sigmoid_scores = true;
  EXPECT_THAT(numbers(choose_experts(sizes, logits, {})), ElementsAre(2, 3)) << "by the best two";
  const std::vector<float> bias = {1.0f, 0.0f, 0.0f, 0.0f};
  sizes.has_normed_weights = true;
  sizes.scale = 2.0f;
  const auto biased = choose_experts(sizes, logits, bias);
  EXPECT_THAT(numbers(biased), ElementsAre(0, 1));
  EXPECT_NEAR(biased[0].weight + biased[1].weight, 2.0f, 1e-6);
  EXPECT_LT(biased[0].weight, biased[1].weight) << "the bias counts for the choice alone";
}

TEST(ChooseExperts, TakesTheLowerNumberOfTwoEqualOnes) {
  ExpertSizes sizes;
  sizes.num_experts = 3;
  sizes.num_used = 1;
  const std::vector<float> logits = {0.0f, 2.0f, 2.0f};
  EXPECT_EQ(choose_experts(sizes, logits, {}).front().expert, 1);
}

}  // namespace
}  // namespace kvx::runner
