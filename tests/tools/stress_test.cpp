// run_stress on a tiny model: its figures are those of feeding every question's whole text anew.
#include "tools/kvx/stress/stress_run.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "quality/logits.hpp"
#include "tests/tools/tiny_model.hpp"

namespace kvx::tool::stress_test {
namespace {

constexpr int kContext = 1024;
constexpr int kLength = 500;

class Stress : public ::testing::Test {
 protected:
  void SetUp() override {
    engine_ = std::move(make_engine(2)).value();
    const tests::TemporaryFile file(tests::tiny_chat_model(kContext).file());
    auto model = runner::Model::load(file.path(), DType::kF32, *engine_.executor);
    ASSERT_TRUE(model.ok()) << model.error().message;
    model_ = std::move(model).value();
    tokenizer_ = runner::Tokenizer::create(model_->gguf()).value();
  }

  static runner::KvAttentionOptions cache_of(const char* recipe) {
    runner::KvAttentionOptions options;
    options.recipe = kv::parse_recipe(recipe).value();
    options.block_size = 8;
    options.max_tokens = kContext;
    return options;
  }

  std::vector<int> encode(const std::string& text) const {
    return tokenizer_->encode(text, runner::SpecialTokens::kAsText).value();
  }

  // Of the last `count` tokens, all of them fed one by one to a fresh cache.
  double nll_token_by_token(const char* recipe, const std::vector<int>& tokens, int count) {
    auto cache =
        runner::KvAttention::create(model_->config(), cache_of(recipe), *engine_.executor).value();
    std::vector<float> hidden(model_->config().hidden);
    std::vector<float> logits(model_->config().vocab_size);
    double sum = 0;
    for (size_t t = 0; t + 1 < tokens.size(); ++t) {
      EXPECT_TRUE(model_->forward(std::span(&tokens[t], 1), *cache, hidden.data()).ok());
      if (t + 1 < tokens.size() - count) continue;
      EXPECT_TRUE(model_->logits(hidden.data(), 1, logits.data()).ok());
      sum += quality::negative_log_likelihood(logits, quality::summarize(logits), tokens[t + 1]);
    }
    return sum;
  }

  Engine engine_;
  std::unique_ptr<runner::Model> model_;
  std::optional<runner::Tokenizer> tokenizer_;
};

TEST_F(Stress, ScoresAnswersAsAFreshCacheDoes) {
  const char* kRecipes[] = {"bf16", "int4", "int4:sink=8,recent=8"};
  StressPlan plan;
  for (const char* recipe : kRecipes) plan.caches.push_back(cache_of(recipe));
  plan.lengths = {kLength};
  plan.seed = 4;
  StressReport report;
  Progress progress;
  ASSERT_TRUE(run_stress(*model_, *tokenizer_, plan, engine_, progress, report).ok());
  ASSERT_EQ(report.retrieval.size(), 3u);
  ASSERT_TRUE(report.drift.empty());

  const RetrievalReport& passkey = report.retrieval[0];
  ASSERT_EQ(passkey.num_questions, 1);
  const auto count = [&](std::string_view text) -> Result<int64_t> {
    return std::ssize(encode(std::string(text)));
  };
  const uint64_t seed = plan.seed * 1000003 + kLength * 101;  // sample 0 of task 0
  const quality::RetrievalText made =
      quality::make_retrieval_text(passkey.task, seed, kLength, count).value();
  const quality::Question& asked = made.questions.front();
  const std::vector<int> tokens = encode(made.text + asked.question + asked.answer);
  EXPECT_LE(tokens.size(), static_cast<size_t>(kLength));
  const int num_answers = static_cast<int>(encode(asked.answer).size());
  double base = 0;
  for (size_t c = 0; c < std::size(kRecipes); ++c) {
    const double nll = nll_token_by_token(kRecipes[c], tokens, num_answers) / num_answers;
    if (c == 0) base = nll;
    EXPECT_NEAR(passkey.scores[c].nll.value, nll, 1e-5 * nll) << kRecipes[c];
    EXPECT_NEAR(passkey.scores[c].nll_change.value, nll - base, 1e-5 * nll) << kRecipes[c];
  }
  EXPECT_NE(passkey.scores[1].nll.value, passkey.scores[2].nll.value);
  EXPECT_FALSE(std::isfinite(passkey.scores[0].nll.standard_error)) << "one question alone";
  EXPECT_TRUE(std::isfinite(report.retrieval[1].scores[1].nll_change.standard_error));
}

TEST_F(Stress, FindsNoDriftOfTheBaseAndSomeOfOthers) {
  StressPlan plan;
  for (const char* recipe : {"bf16", "bf16:immediate", "int8", "int4"}) {
    plan.caches.push_back(cache_of(recipe));
  }
  plan.drift_tokens = 100;
  StressReport report;
  Progress progress;
  ASSERT_TRUE(run_stress(*model_, *tokenizer_, plan, engine_, progress, report).ok());
  ASSERT_EQ(report.drift.size(), static_cast<size_t>(kDriftParts));
  int64_t next = 0;
  double int8 = 0, int4 = 0;
  for (const DriftPart& part : report.drift) {
    EXPECT_EQ(part.first_token, next);
    next += part.num_tokens;
    EXPECT_EQ(part.kl[0].value, 0);
    EXPECT_EQ(part.kl[1].value, 0);
    EXPECT_EQ(part.same_top[1].value, 100);
    int8 += part.kl[2].value;
    int4 += part.kl[3].value;
  }
  EXPECT_EQ(next, plan.drift_tokens);
  EXPECT_GT(int8, 0);
  EXPECT_GT(int4, 4 * int8);
}

TEST_F(Stress, SumsUpWhatSaturates) {
  StressReport report;
  StressCache cache;
  cache.name = "fp8_e4m3";
  cache.saturation = {{{{0, 3}, {0, 0}}, {{0, 0}, {0, 0}}}, {{{0, 0}, {0, 0}}, {{0, 0}, {0, 9}}}};
  report.caches = {cache};
  EXPECT_THAT(stress_table(report, false),
              ::testing::HasSubstr("fp8_e4m3: 12 inputs in 2 of 4 heads, most in 1:1\n"));
}

}  // namespace
}  // namespace kvx::tool::stress_test
