// Facts first, then as many filler sentences around them as the tokens allow.
#include "quality/retrieval.hpp"

#include <algorithm>
#include <random>
#include <span>

namespace kvx::quality {
namespace {

constexpr std::string_view kFiller[] = {
    " the grass is green.", " the sky is blue.",          " the sun is yellow.",
    " here we go.",         " there and back again.",     " the river runs to the sea.",
    " birds sing at dawn.", " the road is long and dry.",
};
constexpr std::string_view kNames[] = {"anna",  "peter", "maria", "david",
                                       "laura", "simon", "julia", "oscar"};
constexpr std::string_view kDays[] = {"monday", "tuesday", "friday"};
constexpr int kEntityNames = 3;

// Draws that are the same with every standard library.
class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}

  int below(int count) { return static_cast<int>(random_() % static_cast<uint64_t>(count)); }
  std::string digits(int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += static_cast<char>('1' + below(8));
    return text;
  }

 private:
  std::mt19937_64 random_;
};

// Facts in the order in which they are told.
std::vector<Question> facts_of(RetrievalTask task, Draws& draws) {
  std::vector<Question> facts;
  switch (task) {
    case RetrievalTask::kPasskey:
      facts.push_back({" the pass key is", fmt::format(" {}", draws.digits(5)), 0});
      break;
    case RetrievalTask::kNeedles:
      for (const std::string_view name : kNames) {
        facts.push_back(
            {fmt::format(" the pass key of {} is", name), fmt::format(" {}", draws.digits(5)), 0});
      }
      break;
    case RetrievalTask::kEntities:
      for (const std::string_view day : kDays) {
        for (const std::string_view name : std::span(kNames).first(kEntityNames)) {
          facts.push_back({fmt::format(" on {} {} sits in room", day, name),
                           fmt::format(" {}", draws.digits(4)), 0});
        }
      }
      break;
  }
  for (size_t i = facts.size(); i > 1; --i) {
    std::swap(facts[i - 1], facts[draws.below(static_cast<int>(i))]);
  }
  return facts;
}

// Each fact somewhere in its own equal part of the filler. Sets the facts' depths.
std::string text_with(std::vector<Question>& facts, int num_fillers, Draws draws) {
  const auto count = static_cast<int>(facts.size());
  std::string text;
  std::vector<size_t> places;
  int told = 0;
  for (int i = 0; i < count; ++i) {
    const int begin = static_cast<int>(int64_t{num_fillers} * i / count);
    const int end = static_cast<int>(int64_t{num_fillers} * (i + 1) / count);
    const int place = begin + draws.below(end - begin + 1);
    for (; told < place; ++told) text += kFiller[told % std::size(kFiller)];
    places.push_back(text.size());
    text += facts[i].question + facts[i].answer + ".";
  }
  for (; told < num_fillers; ++told) text += kFiller[told % std::size(kFiller)];
  for (int i = 0; i < count; ++i) {
    facts[i].depth = static_cast<double>(places[i]) / static_cast<double>(text.size());
  }
  return text;
}

}  // namespace

std::string_view name_of(RetrievalTask task) {
  constexpr std::string_view kTaskNames[] = {"passkey", "needles", "entities"};
  return kTaskNames[static_cast<int>(task)];
}

Result<RetrievalText> make_retrieval_text(RetrievalTask task, uint64_t seed, int64_t max_tokens,
                                          const CountTokens& count) {
  Draws draws(seed);
  RetrievalText made;
  made.questions = facts_of(task, draws);
  int64_t longest = 0;
  for (const Question& one : made.questions) {
    KVX_ASSIGN_OR_RETURN(const int64_t question, count(one.question));
    KVX_ASSIGN_OR_RETURN(const int64_t answer, count(one.answer));
    longest = std::max(longest, question + answer);
  }
  const int64_t room = max_tokens - longest;
  // The most fillers that fit, by halving: `low` fit, `high` do not.
  int64_t low = -1;
  int64_t high = std::max<int64_t>(1, room);
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    KVX_ASSIGN_OR_RETURN(const int64_t tokens,
                         count(text_with(made.questions, static_cast<int>(middle), draws)));
    (tokens <= room ? low : high) = middle;
  }
  if (low < 0) {
    return invalid_argument("{} tokens are too few for the {} of the task {}", max_tokens,
                            made.questions.size() == 1 ? "fact" : "facts", name_of(task));
  }
  made.text = text_with(made.questions, static_cast<int>(low), draws);
  return made;
}

}  // namespace kvx::quality
