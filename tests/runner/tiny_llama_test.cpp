// The forward pass on a tiny model: logits against Python's doubles, and what a bad file says.
#include "tests/runner/tiny_llama.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runner/kv_attention.hpp"
#include "runner/model.hpp"
#include "tests/runner/forward_pass.hpp"
#include "tests/runner/golden_file.hpp"
#include "tests/runner/reference_attention.hpp"

namespace kvx::runner {
namespace {

using testing::HasSubstr;
using tests::all_logits;
using tests::GgufWriter;
using tests::load;
using tests::ReferenceAttention;
using tests::TemporaryFile;

class TinyLlama : public testing::TestWithParam<int> {
 protected:
  TinyLlama() : golden_(tests::golden_cases("tiny_llama").at(GetParam())) {
    auto loaded = load(tests::tiny_llama(golden_.at("extras")));
    if (!loaded.ok()) throw std::runtime_error(loaded.error().message);
    model_ = std::move(loaded).value();
    tokens_ = golden_.at("tokens").get<std::vector<int>>();
  }

  void expect_golden(const std::vector<float>& logits) const {
    const int vocab = model_->config().vocab_size;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double expected = golden_.at("logits").at(i / vocab).at(i % vocab);
      ASSERT_NEAR(logits[i], expected, 2e-6) << "token " << i / vocab << ", logit " << i % vocab;
    }
  }

  nlohmann::json golden_;
  std::unique_ptr<Model> model_;
  std::vector<int> tokens_;
};

TEST_P(TinyLlama, HasTheLogitsOfTheDefinition) {
  ReferenceAttention attention(model_->config());
  expect_golden(all_logits(*model_, attention, tokens_));
}

TEST_P(TinyLlama, HasThemFromTheKvxCacheToo) {
  KvAttentionOptions options;
  options.recipe = kv::parse_recipe("f32").value();
  options.block_size = 4;
  options.max_tokens = 16;
  auto attention = KvAttention::create(model_->config(), options, serial_executor());
  ASSERT_TRUE(attention.ok()) << attention.error().message;
  expect_golden(all_logits(*model_, *attention.value(), tokens_));
  ASSERT_TRUE(attention.value()->reset().ok());
  expect_golden(all_logits(*model_, *attention.value(), tokens_));
}

TEST_P(TinyLlama, ReportsItsStepsAndStopsAtAnError) {
  ReferenceAttention attention(model_->config(), 3);
  ASSERT_GT(tokens_.size(), 6u);
  std::vector<int64_t> fed;
  const Status stopped = model_->forward(tokens_, attention, nullptr, [&](int64_t num_fed) {
    fed.push_back(num_fed);
    return num_fed < 6 ? Status{} : Status{unsupported("enough")};
  });
  ASSERT_FALSE(stopped.ok());
  EXPECT_EQ(stopped.error().message, "enough");
  EXPECT_EQ(fed, (std::vector<int64_t>{3, 6}));
  EXPECT_EQ(attention.num_tokens(), 6);
}

TEST_P(TinyLlama, DoesNotDependOnHowTokensAreCutIntoSteps) {
  for (const int64_t step : {1, 3, 7}) {
    ReferenceAttention attention(model_->config(), step);
    expect_golden(all_logits(*model_, attention, tokens_));
  }
}

INSTANTIATE_TEST_SUITE_P(PlainAndWithExtras, TinyLlama, testing::Values(0, 1));

TEST(Model, RefusesTokensThatDoNotFit) {
  auto model = load(tests::tiny_llama(false));
  ASSERT_TRUE(model.ok()) << model.error().message;
  ReferenceAttention attention(model.value()->config());
  const auto message = [&](const std::vector<int>& tokens) {
    return model.value()->forward(tokens, attention, nullptr).error().message;
  };
  EXPECT_THAT(message({1, 40}), HasSubstr("token is 40; 0 to 39"));
  EXPECT_THAT(message({-1}), HasSubstr("token is -1"));
  EXPECT_THAT(message(std::vector<int>(65, 1)), HasSubstr("65 tokens; the model's context is 64"));
  EXPECT_EQ(attention.num_tokens(), 0);
}

struct BadModel {
  const char* what;
  std::function<void(GgufWriter&)> add;
  const char* message;
};

TEST(Model, SaysWhatIsWrongWithAFile) {
  const BadModel cases[] = {
      {"foreign architecture", [](auto& w) { w.text("general.architecture", "bert"); },
       "general.architecture is bert"},
      {"no sizes", [](auto& w) { w.text("general.architecture", "llama"); },
       "llama.block_count is missing"},
      {"nothing", [](auto&) {}, "general.architecture is missing"},
      {"zero heads",
       [](auto& w) {
         w.text("general.architecture", "llama");
         for (const char* key : {"block_count", "embedding_length", "feed_forward_length"}) {
           w.u32(std::string("llama.") + key, 16);
         }
         w.u32("llama.attention.head_count", 0);
       },
       "llama.attention.head_count is 0; 1 to"},
  };
  for (const BadModel& bad : cases) {
    SCOPED_TRACE(bad.what);
    GgufWriter writer;
    bad.add(writer);
    const auto model = load(writer);
    ASSERT_FALSE(model.ok());
    EXPECT_THAT(model.error().message, HasSubstr(bad.message));
  }
  GgufWriter yarn = tests::tiny_llama(false);
  yarn.text("llama.rope.scaling.type", "yarn");
  EXPECT_THAT(load(yarn).error().message, HasSubstr("llama.rope.scaling.type is yarn"));
}

TEST(Model, SaysWhenAFileCannotBeOpened) {
  const auto message = [](const char* path) {
    return Model::load(path, DType::kF32, serial_executor()).error().message;
  };
  EXPECT_THAT(message("/no/such/model.gguf"), HasSubstr("/no/such/model.gguf: cannot be opened"));
  EXPECT_THAT(message("/"), HasSubstr("not a regular file"));
  const TemporaryFile empty({});
  EXPECT_THAT(message(empty.path().c_str()), HasSubstr("is empty"));
}

}  // namespace
}  // namespace kvx::runner
