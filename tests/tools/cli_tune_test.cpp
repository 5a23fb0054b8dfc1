// kvx tune from outside, on a tiny model: a file that the library reads, and what is refused.
#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/tools/cli_with_model.hpp"
#include "tune/tune_file.hpp"

namespace kvx::tool::cli_tune_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Windows of 32 tokens in blocks of 4; 3 prompts, 1 window of either kind.
constexpr const char* kSmall =
    "tune -m model.gguf -f text.txt --ctx 32 --chunks 1 --num-prompts 3 --block-size 4 ";

class CliTune : public CliWithModel {
 protected:
  bool exists(const char* name) const { return std::filesystem::exists(work() / name); }
  void expect_refusal(const std::string& options, const char* message) {
    const Outcome outcome = kvx(kSmall + options);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(message));
    EXPECT_FALSE(exists("model.kvxtune"));
  }
};

TEST_F(CliTune, WritesAFileThatTheLibraryReads) {
  const Outcome outcome = kvx(kSmall + std::string("--cache int4:immediate"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("K's block offset"));
  EXPECT_THAT(outcome.out, HasSubstr("wrote model.kvxtune"));
  const auto file = tune::read_tune_file((work() / "model.kvxtune").string());
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_THAT(file.value().recipe, HasSubstr("int4:immediate"));
  EXPECT_EQ(file.value().layers.size(), 2u);
  EXPECT_EQ(file.value().model.architecture, "llama");
  const auto measured = nlohmann::json::parse(file.value().measured);
  EXPECT_EQ(measured["prompts"], 3);
  EXPECT_EQ(measured["judged"].size(), 2u);
}

TEST_F(CliTune, KeepsABudgetHeadByHead) {
  const Outcome outcome = kvx(kSmall + std::string("--cache int4:immediate --budget kl=0.001"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("K error x1000"));
  EXPECT_THAT(outcome.out, HasSubstr("head by head"));
  const auto file = tune::read_tune_file((work() / "model.kvxtune").string());
  ASSERT_TRUE(file.ok()) << file.error().message;
  const auto measured = nlohmann::json::parse(file.value().measured);
  EXPECT_EQ(measured["layers"][1]["heads"].size(), 2u);
}

// In rows of 8 numbers int4 has 6 bits and int8 10: there is room for one head of one side.
TEST_F(CliTune, SpendsBitsOnSingleHeadsWhichTheFileKeeps) {
  const Outcome outcome = kvx(kSmall + std::string("--cache int4:immediate --bits 6.6"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("heads: "));
  const auto file = tune::read_tune_file((work() / "model.kvxtune").string());
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_FALSE(file.value().head_overrides.empty());
  const Outcome compared =
      kvx("compare -m model.gguf -f text.txt --formats tuned:model.kvxtune --ctx 32 --chunks 1 "
          "--block-size 4");
  EXPECT_EQ(compared.exit_code, 0) << compared.err;
}

TEST_F(CliTune, WidensWholeLayersWhereAsked) {
  const Outcome outcome =
      kvx(kSmall + std::string("--cache int4:immediate --budget kl=0.001 --widen layers"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, Not(HasSubstr("head by head")));
  const auto file = tune::read_tune_file((work() / "model.kvxtune").string());
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_THAT(file.value().head_overrides, IsEmpty());
  const auto measured = nlohmann::json::parse(file.value().measured);
  EXPECT_TRUE(measured["layers"][1]["k_error"].is_number());
}

TEST_F(CliTune, EndsWithThreeWhereNothingKeepsTheBudget) {
  const Outcome outcome = kvx(kSmall + std::string("--cache int4:immediate --bits 2"));
  EXPECT_EQ(outcome.exit_code, 3) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("bits is 2; the cheapest cache has"));
  EXPECT_THAT(outcome.out, HasSubstr("tuned"));
  EXPECT_FALSE(exists("model.kvxtune"));
}

TEST_F(CliTune, RefusesBadInputAndWritesNothing) {
  expect_refusal("--budget kl=much", "budget is 'kl=much'");
  expect_refusal("--budget kl=0.1 --bits 5", "expected one of the two");
  expect_refusal("--widen tokens", "--widen: tokens not in {heads,layers}");
  expect_refusal("--percentile 101", "percentile is 101");
  expect_refusal("--cache int9", "format is 'int9'");
  write("few.jsonl", "\"one\"\n");
  expect_refusal("--prompts few.jsonl", "with 1 prompts; num-prompts asks for 3");
  expect_refusal("--out nowhere/x.kvxtune", "out is 'nowhere/x.kvxtune'");
}

}  // namespace
}  // namespace kvx::tool::cli_tune_test
