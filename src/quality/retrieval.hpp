// Retrieval tasks: texts with facts hidden among filler, and questions about them. They show what a
// cache forgets over a distance, which the perplexity of ordinary text hardly does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/result.hpp"

namespace kvx::quality {

enum class RetrievalTask {
  kPasskey,   // one number, somewhere
  kNeedles,   // eight names with a number each
  kEntities,  // three names on three days: facts that differ in one word and a number
};
inline constexpr RetrievalTask kRetrievalTasks[] = {
    RetrievalTask::kPasskey, RetrievalTask::kNeedles, RetrievalTask::kEntities};

std::string_view name_of(RetrievalTask task);

// The model continues text + question; all of answer's tokens should come next.
struct Question {
  std::string question;  // " the pass key of anna is"
  std::string answer;    // " 48213"
  double depth;          // of its fact in the text: 0 is the beginning, 1 the end
};

struct RetrievalText {
  std::string text;
  std::vector<Question> questions;
};

// The number of a text's tokens.
using CountTokens = std::function<Result<int64_t>(std::string_view)>;

// A text that with any of its questions and answers has at most max_tokens tokens, and not many
// less: as much filler as fits, the same for a seed on every machine. Small letters, the digits 1
// to 8, blanks and full stops. INVALID_ARGUMENT: max_tokens do not hold the facts; errors of count.
Result<RetrievalText> make_retrieval_text(RetrievalTask task, uint64_t seed, int64_t max_tokens,
                                          const CountTokens& count);

}  // namespace kvx::quality
