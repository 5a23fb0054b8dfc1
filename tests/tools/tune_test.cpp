// The parts of kvx tune: goals, candidates, assignments and what a corpus is made of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "kv/plan/layer_plan.hpp"
#include "tests/support/temporary_path.hpp"
#include "tests/tools/tiny_model.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/tune/budget.hpp"
#include "tools/kvx/tune/options.hpp"
#include "tools/kvx/tune/plan_text.hpp"

namespace kvx::tool {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(Goal, ReadsABudgetOrBits) {
  EXPECT_EQ(parse_goal("", 0).value().kind, Goal::Kind::kNone);
  const Goal kl = parse_goal("kl=0.01", 0).value();
  EXPECT_EQ(kl.kind, Goal::Kind::kKl);
  EXPECT_EQ(kl.limit, 0.01);
  const Goal ppl = parse_goal("ppl=0.5%", 0).value();
  EXPECT_EQ(ppl.kind, Goal::Kind::kPerplexity);
  EXPECT_EQ(ppl.limit, 0.5);
  EXPECT_EQ(parse_goal("", 4.5).value().kind, Goal::Kind::kBits);
}

TEST(Goal, RefusesWhatIsNoBudget) {
  for (const char* budget : {"kl", "kl=", "kl=0", "kl=-1", "kl=nan", "kl=inf", "kl=0.01x",
                             "ppl=0.5", "bits=4", "0.01", "ppl=%"}) {
    const Result<Goal> goal = parse_goal(budget, 0);
    ASSERT_FALSE(goal.ok()) << budget;
    EXPECT_THAT(goal.error().message, HasSubstr("budget is '")) << budget;
  }
  EXPECT_THAT(parse_goal("kl=0.01", 4.5).error().message, HasSubstr("expected one of the two"));
}

TEST(Candidate, WritesLayersOfOneFormatAsOneOverride) {
  Candidate candidate;
  candidate.recipe = "nvfp4:k.hadamard,search,sink=16,recent=64";
  for (const int layer : {0, 1, 2}) candidate.layers[layer] = {{"int8", "nvfp4"}};
  candidate.layers[7] = {{"int8", "nvfp4"}, {"int8", "nvfp4"}, {"int8", "nvfp4"}};
  candidate.layers[4] = {{"bf16", "bf16"}};
  const OverrideTexts texts = candidate.override_texts().value();
  EXPECT_THAT(texts.layers,
              ElementsAre("4=bf16:k.hadamard", "0-2,7=int8/nvfp4:k.hadamard,v.search"));
  EXPECT_THAT(texts.heads, IsEmpty());
  EXPECT_EQ(read_candidate(candidate).value().overrides.size(), 2u);
}

// Heads keep their layer's rotation; those of the recipe's formats are not named.
TEST(Candidate, WritesHeadsThatDifferInALayer) {
  Candidate candidate;
  candidate.recipe = "nvfp4:k.hadamard,search,sink=16,recent=64";
  candidate.layers[0] = {{"int8", "nvfp4"}, {"nvfp4", "nvfp4"}, {"bf16", "bf16"}};
  candidate.layers[5] = {{"nvfp4", "nvfp4"}, {"nvfp4", "nvfp4"}, {"int8", "nvfp4"}};
  const OverrideTexts texts = candidate.override_texts().value();
  EXPECT_THAT(texts.layers, IsEmpty());
  EXPECT_THAT(texts.heads, ElementsAre("0:2=bf16", "0:0,5:2=int8/nvfp4:v.search"));

  const kv::CacheGeometry geometry{6, 3, 64, 64};
  const ReadCandidate read = read_candidate(candidate).value();
  const auto plans = kv::plan_layers(geometry, read.recipe, read.overrides).value();
  ASSERT_EQ(plans[0].runs.size(), 3u);
  EXPECT_TRUE(plans[0].k_hadamard);
  EXPECT_EQ(plans[0].runs[2].k.spec.facts->name, "bf16");
  EXPECT_EQ(plans[5].runs.size(), 2u);
  EXPECT_EQ(plans[1].runs.size(), 1u);
}

TEST(Candidate, CutsLongListsOfHeads) {
  Candidate candidate;
  candidate.recipe = "int4";
  for (int layer = 0; layer < 100; ++layer) {
    candidate.layers[layer] = {{"int8", "int4"}, {"int8", "int4"}, {"int4", "int4"}};
  }
  const OverrideTexts texts = candidate.override_texts().value();
  ASSERT_EQ(texts.heads.size(), 2u);
  for (const std::string& text : texts.heads) EXPECT_LT(text.size(), 2048u);
  const std::vector<kv::RecipeOverride> overrides = read_candidate(candidate).value().overrides;
  EXPECT_EQ(overrides[0].where.size() + overrides[1].where.size(), 200u);
}

TEST(TuningOptions, ApplyWhereTheyChangeSomething) {
  const std::vector<TuningOption> options = options_of(99.9);
  const auto applies = [&](const char* recipe, const char* name) {
    Candidate candidate = untuned(recipe).value();
    for (const TuningOption& option : options) {
      if (option.name == name) return option.add(candidate).value();
    }
    ADD_FAILURE() << name;
    return false;
  };
  EXPECT_TRUE(applies("nvfp4", "k.hadamard"));
  EXPECT_FALSE(applies("nvfp4:auto", "k.hadamard"));
  EXPECT_TRUE(applies("nvfp4", "search"));
  EXPECT_FALSE(applies("int8_affine", "search"));
  EXPECT_FALSE(applies("fp8_e4m3", "search"));
  EXPECT_TRUE(applies("int8/bf16", "K's block offset"));
  EXPECT_FALSE(applies("int8/bf16", "V's mean"));
  EXPECT_TRUE(applies("nvfp4/int8", "tensor scales amax/448"));
  EXPECT_FALSE(applies("int4", "tensor scales amax/448"));
  EXPECT_TRUE(applies("fp8_e4m3", "given scales at the maximum"));
  EXPECT_FALSE(applies("int8", "given scales at the maximum"));
  EXPECT_FALSE(applies("int8:source=given", "given scales at the maximum"));
  EXPECT_TRUE(applies("int8:source=given", "given scales at 99.9 %"));
}

std::vector<std::string> ladder_names(const char* recipe, int block_size, bool is_k = true) {
  const kv::Recipe cheapest = kv::parse_recipe(recipe).value();
  const SideLadder ladder = ladder_of(cheapest, 64, block_size, is_k).value();
  std::vector<std::string> names;
  for (const FormatError& step : ladder.formats) names.push_back(step.format);
  return names;
}

TEST(SideLadder, HasDualScaleFormatsWhereTheCacheHoldsTheirBlocks) {
  EXPECT_THAT(ladder_names("int3_dual/int2_dual:auto", 64, false),
              ElementsAre("int2_dual", "int3_dual", "int4", "int4_dual", "nvfp4", "int8", "bf16"));
  EXPECT_THAT(ladder_names("int4:auto", 64),
              ElementsAre("int4", "int4_dual", "nvfp4", "int8", "bf16"));
  EXPECT_THAT(ladder_names("int4:auto", 32), ElementsAre("int4", "nvfp4", "int8", "bf16"));
  EXPECT_THAT(ladder_names("int4:immediate", 64), ElementsAre("int4", "nvfp4", "int8", "bf16"));
}

// Two layers; the second is ten times as fragile, and K more than V.
Assignment small_assignment() {
  const SideLadder k{{{"int4", 4, {1, 10}}, {"int8", 8, {0.1, 1}}, {"bf16", 16, {0, 0}}}};
  const SideLadder v{{{"int4", 4, {0.5, 5}}, {"int8", 8, {0.05, 0.5}}, {"bf16", 16, {0, 0}}}};
  return Assignment(k, v, 2, 1);
}

TEST(Assignment, WidensWhatLosesMostABit) {
  Assignment assignment = small_assignment();
  EXPECT_EQ(assignment.bits(), 4);
  EXPECT_EQ(assignment.error(), 16.5);
  ASSERT_TRUE(assignment.widen(1e9));
  EXPECT_THAT(assignment.formats(1), ElementsAre(KvFormats{"int8", "int4"}));
  EXPECT_EQ(assignment.bits(), 5);
  ASSERT_TRUE(assignment.widen(1e9));
  EXPECT_THAT(assignment.formats(1), ElementsAre(KvFormats{"int8", "int8"}));
  EXPECT_THAT(assignment.formats(0), ElementsAre(KvFormats{"int4", "int4"}));
}

// One layer of two heads: head 1's K loses most.
TEST(Assignment, WidensSingleHeads) {
  const SideLadder k{{{"int4", 4, {1, 10}}, {"bf16", 16, {0, 0}}}};
  const SideLadder v{{{"int4", 4, {2, 3}}, {"bf16", 16, {0, 0}}}};
  Assignment assignment(k, v, 1, 2);
  EXPECT_EQ(assignment.error(CacheSide::kK, 0), 11);
  ASSERT_TRUE(assignment.widen(1e9));
  EXPECT_THAT(assignment.formats(0),
              ElementsAre(KvFormats{"int4", "int4"}, KvFormats{"bf16", "int4"}));
  EXPECT_EQ(assignment.bits(0), (4 + 16 + 4 + 4) / 4.0);
  EXPECT_EQ(assignment.error(), 6);
}

TEST(PlanText, ShowsHeadsThatDiffer) {
  const SideLadder k{{{"int4", 4.25, {1, 10}}, {"bf16", 16, {0, 0}}}};
  const SideLadder v{{{"int4", 4.25, {5, 0.5}}, {"bf16", 16, {0, 0}}}};
  Assignment assignment(k, v, 1, 2);
  ASSERT_TRUE(assignment.widen(1e9));
  const std::string text = plan_text(assignment, false);
  EXPECT_THAT(text, HasSubstr("int4; bf16 in head 1"));
  EXPECT_THAT(text, HasSubstr("  4.2 16.0 "));
  EXPECT_THAT(text, HasSubstr("|% |"));
  EXPECT_THAT(text, HasSubstr("|@#|"));
}

TEST(PlanText, LeavesThePictureOutWhereLayersAreWidenedWhole) {
  EXPECT_THAT(plan_text(small_assignment(), false), Not(HasSubstr("head by head")));
}

TEST(Assignment, StopsAtItsBits) {
  Assignment assignment = small_assignment();
  while (assignment.widen(6)) {
  }
  EXPECT_EQ(assignment.bits(), 6);
  EXPECT_FALSE(assignment.widen(6.5));
}

TEST(Assignment, EndsWithEverythingWide) {
  Assignment assignment = small_assignment();
  while (assignment.widen(1e9)) {
  }
  EXPECT_EQ(assignment.bits(), 16);
  EXPECT_EQ(assignment.error(), 0);
}

class CorpusTest : public ::testing::Test {
 protected:
  static runner::Tokenizer tokenizer() {
    static const std::vector<uint8_t> file = tests::tiny_chat_model().file();
    return runner::Tokenizer::create(runner::GgufView::parse(file).value()).value();
  }
  ~CorpusTest() override {
    for (const std::string& path : written_) std::filesystem::remove(path);
  }
  std::string written(const char* name, const std::string& content) {
    written_.push_back(tests::temporary_path(name));
    EXPECT_TRUE(write_file("text", written_.back(), content).ok());
    return written_.back();
  }

 private:
  std::vector<std::string> written_;
};

TEST_F(CorpusTest, DealsWindowsThatShareNoToken) {
  CorpusOptions options{written("text", tests::tiny_text(200)), "", 3, 20, 2};
  const Corpus corpus = read_corpus(options, tokenizer()).value();
  EXPECT_EQ(corpus.prompts.size(), 3u);
  EXPECT_EQ(corpus.selection.size(), 2u);
  EXPECT_EQ(corpus.verification.size(), 2u);
  EXPECT_EQ(corpus.num_prompt_tokens(), 60);
  EXPECT_NE(corpus.prompts[0], corpus.selection[0]);
}

TEST_F(CorpusTest, RefusesTooLittleText) {
  CorpusOptions options{written("text", tests::tiny_text(100)), "", 3, 20, 2};
  EXPECT_THAT(read_corpus(options, tokenizer()).error().message,
              HasSubstr("with 100 tokens; 3 prompts and twice 2 windows of 20 need 140"));
}

TEST_F(CorpusTest, ReadsPromptsOfThreeKinds) {
  const std::string lines =
      "{\"prompt\": \"abc\"}\n\n\"hello\"\n{\"messages\": [{\"role\": \"user\", \"content\": "
      "\"hi\"}]}\n{\"text\": \"abcdefghijklmnopqrstuvwxyz\"}\n";
  CorpusOptions options{written("text", tests::tiny_text(200)), written("prompts", lines), 0, 20,
                        2};
  const Corpus corpus = read_corpus(options, tokenizer()).value();
  ASSERT_EQ(corpus.prompts.size(), 4u);
  EXPECT_EQ(corpus.prompts[0].size(), 3u);
  EXPECT_EQ(corpus.prompts[1].size(), 5u);
  EXPECT_GT(corpus.prompts[2].size(), 6u);   // the template's marks
  EXPECT_EQ(corpus.prompts[3].size(), 20u);  // cut at the context
}

TEST_F(CorpusTest, RefusesFewerPromptsThanAsked) {
  CorpusOptions options{written("text", tests::tiny_text(200)), written("few", "\"abc\"\n"), 2, 20,
                        2};
  EXPECT_THAT(read_corpus(options, tokenizer()).error().message,
              HasSubstr("with 1 prompts; num-prompts asks for 2"));
}

TEST_F(CorpusTest, NamesALineThatIsNoPrompt) {
  for (const char* line : {"{", "7", "{\"prompt\": 3}", "{\"messages\": [1]}", "[]"}) {
    CorpusOptions options{written("text", tests::tiny_text(200)),
                          written("bad", "\"abc\"\n" + std::string(line) + "\n"), 0, 20, 2};
    EXPECT_THAT(read_corpus(options, tokenizer()).error().message, HasSubstr("prompts line 2 is"))
        << line;
  }
}

}  // namespace
}  // namespace kvx::tool
