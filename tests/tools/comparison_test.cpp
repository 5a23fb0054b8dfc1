// compare_caches on a tiny model: its figures are those of decoding token by token.
#include "tools/kvx/compare/comparison.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "quality/logits.hpp"
#include "tests/tools/tiny_model.hpp"
#include "tools/kvx/compare/logit_errors.hpp"
#include "tools/kvx/compare/window_scores.hpp"

namespace kvx::tool::comparison_test {
namespace {

constexpr int kContext = 48;
constexpr int kBlockSize = 4;

class Comparison : public ::testing::Test {
 protected:
  void SetUp() override {
    engine_ = std::move(make_engine(2)).value();
    const tests::TemporaryFile file(tests::tiny_chat_model().file());
    auto model = runner::Model::load(file.path(), DType::kF32, *engine_.executor);
    ASSERT_TRUE(model.ok()) << model.error().message;
    model_ = std::move(model).value();
  }

  static runner::KvAttentionOptions cache_of(const char* recipe) {
    runner::KvAttentionOptions options;
    options.recipe = kv::parse_recipe(recipe).value();
    options.block_size = kBlockSize;
    options.max_tokens = kContext;
    return options;
  }

  // Tokens of no meaning, none of them special.
  static std::vector<int> tokens_of(int count) {
    std::vector<int> tokens;
    uint32_t state = 7;
    for (int i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      tokens.push_back(static_cast<int>(4 + (state >> 16) % 36));
    }
    return tokens;
  }

  std::vector<CacheReport> compare(std::vector<const char*> recipes, int num_windows) {
    ComparisonPlan plan{{}, kContext, num_windows};
    for (const char* recipe : recipes) plan.caches.push_back(cache_of(recipe));
    Progress progress;
    auto reports =
        compare_caches(*model_, tokens_of(kContext * num_windows), plan, engine_, progress);
    if (!reports.ok()) ADD_FAILURE() << reports.error().message;
    return reports.ok() ? std::move(reports).value() : std::vector<CacheReport>();
  }

  // Perplexity of the windows' second halves, one token at a time through a cache of its own.
  double perplexity_token_by_token(const char* recipe, int num_windows) {
    const std::vector<int> tokens = tokens_of(kContext * num_windows);
    double sum = 0;
    int count = 0;
    for (int w = 0; w < num_windows; ++w) {
      auto attention =
          runner::KvAttention::create(model_->config(), cache_of(recipe), *engine_.executor);
      EXPECT_TRUE(attention.ok());
      for (int position = 0; position + 1 < kContext; ++position) {
        const int* token = tokens.data() + w * kContext + position;
        std::vector<float> hidden(model_->config().hidden);
        std::vector<float> logits(model_->config().vocab_size);
        EXPECT_TRUE(model_->forward({token, 1}, *attention.value(), hidden.data()).ok());
        EXPECT_TRUE(model_->logits(hidden.data(), 1, logits.data()).ok());
        if (position < kContext / 2) continue;
        sum += quality::negative_log_likelihood(logits, quality::summarize(logits), token[1]);
        ++count;
      }
    }
    return std::exp(sum / count);
  }

  Engine engine_;
  std::unique_ptr<runner::Model> model_;
};

TEST_F(Comparison, FindsNoDifferenceBetweenTheBaseAndItself) {
  const std::vector<CacheReport> reports = compare({"bf16", "bf16:immediate"}, 2);
  ASSERT_EQ(reports.size(), 2u);
  for (const CacheReport& report : reports) {
    EXPECT_EQ(report.change_percent.value, 0);
    EXPECT_EQ(report.kl.value, 0);
    EXPECT_EQ(report.same_top_percent.value, 100);
    EXPECT_EQ(worst_layer(report).relative_error, 0);
    EXPECT_EQ(report.windows.size(), 2u);
  }
}

TEST_F(Comparison, GivesThePerplexityOfDecodingTokenByToken) {
  const std::vector<const char*> recipes = {"bf16", "int4", "int4:sink=4,recent=9",
                                            "int8/int4:hadamard,recent=4"};
  const std::vector<CacheReport> reports = compare(recipes, 2);
  ASSERT_EQ(reports.size(), recipes.size());
  for (size_t i = 0; i < recipes.size(); ++i) {
    const double expected = perplexity_token_by_token(recipes[i], 2);
    EXPECT_NEAR(reports[i].perplexity.value, expected, 1e-5 * expected) << recipes[i];
  }
  // Were the caches all alike, the lines above would say little.
  EXPECT_GT(std::abs(reports[1].change_percent.value - reports[2].change_percent.value), 1e-4);
}

TEST_F(Comparison, SeesMoreErrorWhereLessIsStored) {
  const std::vector<CacheReport> reports = compare({"bf16", "int8", "int4"}, 1);
  ASSERT_EQ(reports.size(), 3u);
  EXPECT_GT(worst_layer(reports[1]).relative_error, 0);
  EXPECT_GT(worst_layer(reports[2]).relative_error, 4 * worst_layer(reports[1]).relative_error);
  EXPECT_GT(reports[2].kl.value, reports[1].kl.value);
  EXPECT_LT(reports[2].bytes_per_token, reports[1].bytes_per_token);
}

TEST_F(Comparison, MeasuresLogitsByHeadWhereTheyAreWanted) {
  EXPECT_TRUE(compare({"bf16", "int4"}, 1)[1].logit_heads.empty());
  ComparisonPlan plan{
      {cache_of("bf16"), cache_of("bf16:immediate"), cache_of("int8"), cache_of("int4")},
      kContext,
      1,
      true};
  plan.caches[3].overrides = {kv::parse_head_override("1:0=bf16").value()};
  Progress progress;
  const auto reports = compare_caches(*model_, tokens_of(kContext), plan, engine_, progress);
  ASSERT_TRUE(reports.ok()) << reports.error().message;
  const size_t num_heads = 2 * 2;
  for (const CacheReport& report : reports.value()) {
    ASSERT_EQ(report.heads.size(), num_heads);
    ASSERT_EQ(report.logit_heads.size(), num_heads);
  }
  for (size_t head = 0; head < num_heads; ++head) {
    EXPECT_EQ(reports.value()[1].logit_heads[head].relative_error, 0);
    const LayerError& int8 = reports.value()[2].logit_heads[head];
    const LayerError& int4 = reports.value()[3].logit_heads[head];
    if (head == 2) {  // layer 1, KV head 0: the one that stays as the base's
      EXPECT_EQ(int4.relative_error, 0);
      EXPECT_EQ(reports.value()[3].heads[head].relative_error, 0);
      continue;
    }
    EXPECT_GT(int8.relative_error, 0);
    EXPECT_GT(int4.relative_error, 4 * int8.relative_error);
    EXPECT_LT(int4.cosine_similarity, int8.cosine_similarity);
  }
}

// Against logits of keys that went through the cache by themselves.
TEST(LogitErrors, AreThoseOfTheStoredKeys) {
  const Engine engine = make_engine(2).value();
  runner::ModelConfig model;
  model.num_layers = 1, model.num_q_heads = 4, model.num_kv_heads = 2;
  model.head_dim = model.value_dim = 8;
  constexpr int kTokens = 5;
  std::vector<float> k(kTokens * 16), q(32);
  for (size_t i = 0; i < k.size(); ++i) k[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::cos(static_cast<float>(i));
  std::vector<std::unique_ptr<runner::KvAttention>> caches;
  for (const char* recipe : {"f32", "int4"}) {
    runner::KvAttentionOptions options;
    options.recipe = kv::parse_recipe(recipe).value();
    options.max_tokens = kTokens;
    caches.push_back(runner::KvAttention::create(model, options, *engine.executor).value());
    std::vector<float> queries(kTokens * 32), out(kTokens * 32);
    ASSERT_TRUE(caches.back()->begin_step(kTokens).ok());
    ASSERT_TRUE(caches.back()
                    ->append_and_attend(0, kTokens, queries.data(), k.data(), k.data(), out.data())
                    .ok());
    ASSERT_TRUE(caches.back()->end_step().ok());
  }
  LogitErrors errors({1, 4, 2, 8}, 1);
  runner::KvAttention* const others[] = {caches[1].get()};
  ASSERT_TRUE(
      errors
          .add(
              *caches[0], others, [&](int) { return std::span<const float>(q); }, *engine.executor)
          .ok());
  std::vector<float> stored(k.size());
  ASSERT_TRUE(caches[1]
                  ->cache()
                  .gather(caches[1]->sequence(), 0, 0, kTokens,
                          dense_rows(stored.data(), DType::kF32, 2, 8), {})
                  .ok());
  for (int kv_head = 0; kv_head < 2; ++kv_head) {
    double squares = 0, error_squares = 0;
    for (int head = 2 * kv_head; head < 2 * kv_head + 2; ++head) {
      for (int t = 0; t < kTokens; ++t) {
        double exact = 0, other = 0;
        for (int d = 0; d < 8; ++d) {
          const int at = (t * 2 + kv_head) * 8 + d;
          exact += double{q[head * 8 + d]} * k[at];
          other += double{q[head * 8 + d]} * stored[at];
        }
        squares += exact * exact;
        error_squares += (other - exact) * (other - exact);
      }
    }
    EXPECT_NEAR(errors.errors(0)[kv_head].relative_error(), std::sqrt(error_squares / squares),
                1e-5);
  }
}

TEST_F(Comparison, RefusesAHeadDimThatAFormatCannotStore) {
  const ComparisonPlan plan{{cache_of("bf16"), cache_of("nvfp4")}, kContext, 1};
  Progress progress;
  const auto reports = compare_caches(*model_, tokens_of(kContext), plan, engine_, progress);
  ASSERT_FALSE(reports.ok());
  EXPECT_THAT(reports.error().message, ::testing::HasSubstr("head_dim is 8; nvfp4 needs"));
}

TEST(WindowScores, CoverTheSecondHalfButItsLastToken) {
  EXPECT_EQ(first_scored(2048), 1024);
  EXPECT_EQ(num_scored(2048), 1023);
  EXPECT_EQ(num_scored(4), 1);
  EXPECT_EQ(first_scored(5) + num_scored(5), 4);
}

}  // namespace
}  // namespace kvx::tool::comparison_test
