// The real model on real text. KVX_TEST_MODEL is SmolLM2-135M-Instruct Q4_1, KVX_TEST_TEXT is
// debian-policy's policy.txt; ./dev test sets both. Without them these tests fail.
#include "runner/model.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "runner/generate.hpp"
#include "runner/kv_attention.hpp"
#include "tests/runner/golden_file.hpp"
#include "tests/runner/reference_attention.hpp"

namespace kvx::runner {
namespace {

std::string required_path(const char* variable) {
  const char* path = std::getenv(variable);
  if (path == nullptr) {
    throw std::runtime_error(std::string(variable) + " is not set; run ./dev test, which sets it");
  }
  return path;
}

class RealModel : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    executor = make_thread_pool(0);
    auto loaded = Model::load(required_path("KVX_TEST_MODEL"), DType::kF32, *executor);
    if (!loaded.ok()) throw std::runtime_error(loaded.error().message);
    model = std::move(loaded).value();
    auto made = Tokenizer::create(model->gguf());
    if (!made.ok()) throw std::runtime_error(made.error().message);
    tokenizer = std::make_unique<Tokenizer>(std::move(made).value());
  }
  static void TearDownTestSuite() {
    tokenizer.reset();
    model.reset();
    executor.reset();
  }

  static std::unique_ptr<KvAttention> cache(const char* recipe, int64_t max_tokens) {
    KvAttentionOptions options;
    options.recipe = kv::parse_recipe(recipe).value();
    options.max_tokens = max_tokens;
    return KvAttention::create(model->config(), options, *executor).value();
  }

  // exp of the mean negative log-likelihood of the second half of the text's first tokens.
  static double perplexity(AttentionBackend& attention, size_t num_tokens) {
    std::ifstream file(required_path("KVX_TEST_TEXT"));
    std::stringstream text;
    text << file.rdbuf();
    const auto all = tokenizer->encode(text.str(), SpecialTokens::kAsText).value();
    const auto tokens = std::span(all).first(num_tokens);
    const size_t hidden_size = model->config().hidden;
    const size_t vocab = model->config().vocab_size;
    std::vector<float> hidden(num_tokens * hidden_size);
    EXPECT_TRUE(model->forward(tokens, attention, hidden.data()).ok());
    double loss = 0;
    std::vector<float> logits(vocab);
    for (size_t i = num_tokens / 2; i + 1 < num_tokens; ++i) {
      EXPECT_TRUE(model->logits(&hidden[i * hidden_size], 1, logits.data()).ok());
      const float top = logits[likeliest(logits)];
      double total = 0;
      for (const float logit : logits) total += std::exp(double{logit} - top);
      loss += std::log(total) + top - logits[tokens[i + 1]];
    }
    return std::exp(loss / static_cast<double>(num_tokens - 1 - num_tokens / 2));
  }

  static inline std::unique_ptr<Executor> executor;
  static inline std::unique_ptr<Model> model;
  static inline std::unique_ptr<Tokenizer> tokenizer;
};

TEST_F(RealModel, TokenisesAsTheIndependentImplementationDoes) {
  for (const auto& golden : tests::golden_cases("tokenizer_smollm")) {
    SCOPED_TRACE(golden.dump());
    const std::string text = tests::bytes_from_hex(golden.at("text_hex"));
    EXPECT_EQ(tokenizer->encode(text, SpecialTokens::kAsText).value(),
              golden.at("ids").get<std::vector<int>>());
    EXPECT_EQ(tokenizer->encode(text, SpecialTokens::kParse).value(),
              golden.at("ids_with_special").get<std::vector<int>>());
  }
}

TEST_F(RealModel, PredictsTextThroughTheCacheAsThroughPlainAttention) {
  constexpr size_t kTokens = 256;
  tests::ReferenceAttention reference(model->config());
  const double expected = perplexity(reference, kTokens);
  EXPECT_NEAR(expected, 4.21268, 1e-3 * expected);
  EXPECT_NEAR(perplexity(*cache("f32", kTokens), kTokens), expected, 1e-4 * expected);
  EXPECT_NEAR(perplexity(*cache("bf16", kTokens), kTokens), expected, 1e-2 * expected);
}

// Recorded with the f32 products, which are pinned. Another compiler or CPU rounds K and V by a
// last bit, which tips some codes over: the fewer bits, the more of the figure is such chance
// (nvfp4: 1.7 % between g++ and clang).
TEST_F(RealModel, KeepsTheRecordedPerplexities) {
  constexpr size_t kTokens = 512;
  const double f32 = perplexity(*cache("f32", kTokens), kTokens);
  EXPECT_NEAR(f32, 4.40262, 1e-3 * f32);
  EXPECT_NEAR(perplexity(*cache("bf16", kTokens), kTokens), f32, 1e-3 * f32);
  EXPECT_NEAR(perplexity(*cache("int8", kTokens), kTokens), 4.40978, 1e-2 * f32);
  EXPECT_NEAR(perplexity(*cache("nvfp4", kTokens), kTokens), 4.77661, 5e-2 * f32);
  EXPECT_NEAR(perplexity(*cache("nvfp4:auto", kTokens), kTokens), 4.42349, 2e-2 * f32);
}

TEST_F(RealModel, GeneratesTheSameTextTwiceAndWholeCharacters) {
  const auto prompt = tokenizer->encode("The capital of France is", SpecialTokens::kAsText).value();
  std::string texts[2];
  for (std::string& text : texts) {
    const auto attention = cache("bf16", 64);
    GenerateOptions options;
    options.max_tokens = 8;
    const auto result =
        generate(*model, *tokenizer, *attention, prompt, options, [&](std::string_view part) {
          text += part;
          return true;
        });
    ASSERT_TRUE(result.ok()) << result.error().message;
    EXPECT_EQ(tokenizer->decode(result.value().tokens), text);
  }
  EXPECT_NE(texts[0].find("Paris"), std::string::npos) << texts[0];
  EXPECT_EQ(texts[0], texts[1]);
}

TEST_F(RealModel, SaysWhenTheCacheIsTooShortForThePrompt) {
  const auto attention = cache("bf16", 4);
  const auto prompt = tokenizer->encode("one two three four five six", SpecialTokens::kAsText);
  const auto result = generate(*model, *tokenizer, *attention, prompt.value(), {},
                               [](std::string_view) { return true; });
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.error().message.find("the cache is full after 4 tokens"), std::string::npos);
}

// Feeds tokens in one piece; the last one's logits.
std::vector<float> last_logits(Model& model, KvAttention& attention, std::span<const int> tokens) {
  std::vector<float> hidden(tokens.size() * model.config().hidden);
  const Status forward = model.forward(tokens, attention, hidden.data());
  EXPECT_TRUE(forward.ok()) << forward.error().message;
  std::vector<float> logits(model.config().vocab_size);
  const float* last = hidden.data() + hidden.size() - model.config().hidden;
  EXPECT_TRUE(model.logits(last, 1, logits.data()).ok());
  return logits;
}

TEST_F(RealModel, APrefixHitGivesBitwiseEqualLogits) {
  std::ifstream file(required_path("KVX_TEST_TEXT"));
  std::stringstream text;
  text << file.rdbuf();
  const auto all = tokenizer->encode(text.str(), SpecialTokens::kAsText).value();
  const auto tokens = std::span(all).first(300);
  // With wide ends a continuation is exact: the window's blocks are cached as they are.
  for (const char* recipe : {"bf16", "nvfp4:immediate,hadamard", "nvfp4:auto"}) {
    KvAttentionOptions options;
    options.recipe = kv::parse_recipe(recipe).value();
    options.max_tokens = 320;
    options.prefix.is_on = true;
    const auto attention = KvAttention::create(model->config(), options, *executor).value();
    last_logits(*model, *attention, tokens.first(256));
    const auto recomputed = last_logits(*model, *attention, tokens.subspan(256));
    ASSERT_TRUE(attention->reset().ok());
    ASSERT_TRUE(attention->cache().clear_prefixes().ok());
    last_logits(*model, *attention, tokens.first(256));
    ASSERT_TRUE(attention->reset_to_prefix({}, tokens).ok());
    ASSERT_EQ(attention->num_tokens(), 256) << recipe;
    EXPECT_EQ(last_logits(*model, *attention, tokens.subspan(256)), recomputed) << recipe;
  }
}

}  // namespace
}  // namespace kvx::runner
