// Retrieval texts: their facts, their length, and that a seed makes them.
#include "quality/retrieval.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>

namespace kvx::quality {
namespace {

// A token a word.
Result<int64_t> count_words(std::string_view text) {
  return std::count(text.begin(), text.end(), ' ');
}

RetrievalText text_of(RetrievalTask task, uint64_t seed, int64_t max_tokens) {
  return make_retrieval_text(task, seed, max_tokens, count_words).value();
}

class EveryTask : public ::testing::TestWithParam<RetrievalTask> {};

TEST_P(EveryTask, TellsEachAnswerOnceBehindItsQuestion) {
  const RetrievalText made = text_of(GetParam(), 3, 400);
  std::set<std::string> questions;
  double depth = -1;
  for (const Question& one : made.questions) {
    const std::string fact = one.question + one.answer + ".";
    const size_t at = made.text.find(fact);
    ASSERT_NE(at, std::string::npos) << fact;
    EXPECT_EQ(made.text.find(one.question, at + 1), std::string::npos) << "told once";
    EXPECT_DOUBLE_EQ(one.depth, static_cast<double>(at) / static_cast<double>(made.text.size()));
    EXPECT_GT(one.depth, depth) << "in the order in which they are told";
    depth = one.depth;
    questions.insert(one.question);
  }
  EXPECT_EQ(questions.size(), made.questions.size());
}

TEST_P(EveryTask, FillsTheTokensButForLessThanASentence) {
  for (const int64_t max_tokens : {200, 211, 1000}) {
    const RetrievalText made = text_of(GetParam(), 5, max_tokens);
    int64_t longest = 0;
    for (const Question& one : made.questions) {
      longest = std::max(longest, count_words(one.question + one.answer).value());
    }
    const int64_t used = count_words(made.text).value() + longest;
    EXPECT_LE(used, max_tokens);
    EXPECT_GT(used, max_tokens - 8);
  }
}

TEST_P(EveryTask, IsTheSameForASeedAndAnotherForAnother) {
  EXPECT_EQ(text_of(GetParam(), 1, 300).text, text_of(GetParam(), 1, 300).text);
  EXPECT_NE(text_of(GetParam(), 1, 300).text, text_of(GetParam(), 2, 300).text);
}

TEST_P(EveryTask, RefusesTooFewTokens) {
  const auto made = make_retrieval_text(GetParam(), 1, 6, count_words);
  ASSERT_FALSE(made.ok());
  EXPECT_THAT(made.error().message, ::testing::HasSubstr("6 tokens are too few for the fact"));
}

TEST_P(EveryTask, PassesOnWhatTheTokenizerRefuses) {
  const auto refuse = [](std::string_view) -> Result<int64_t> {
    return invalid_argument("no such letter");
  };
  EXPECT_EQ(make_retrieval_text(GetParam(), 1, 100, refuse).error().message, "no such letter");
}

INSTANTIATE_TEST_SUITE_P(Retrieval, EveryTask, ::testing::ValuesIn(kRetrievalTasks),
                         [](const auto& task) { return std::string(name_of(task.param)); });

TEST(Retrieval, AsksForOnePasskeyEightNeedlesAndNineEntities) {
  EXPECT_EQ(text_of(RetrievalTask::kPasskey, 1, 300).questions.size(), 1u);
  EXPECT_EQ(text_of(RetrievalTask::kNeedles, 1, 300).questions.size(), 8u);
  EXPECT_EQ(text_of(RetrievalTask::kEntities, 1, 300).questions.size(), 9u);
}

}  // namespace
}  // namespace kvx::quality
