// Counting and joining the tokens of a chat's turns.
#include "tools/kvx/chat/history.hpp"

#include <cstddef>

namespace kvx::tool {

int64_t ChatHistory::count_tokens(size_t first) const {
  size_t count = opening_.size();
  for (size_t t = first; t < turns_.size(); ++t) {
    count += turns_[t].words.size();
    if (t + 1 < turns_.size()) count += turns_[t].answer.size() + end_of_answer_.size();
  }
  return static_cast<int64_t>(count);
}

std::optional<int> ChatHistory::make_room(int64_t context, int64_t room) {
  const size_t last = turns_.size() - 1;
  if (count_tokens(last) + 1 > context) return std::nullopt;
  size_t first = 0;
  while (first < last && count_tokens(first) + room > context) ++first;
  turns_.erase(turns_.begin(), turns_.begin() + static_cast<ptrdiff_t>(first));
  return static_cast<int>(first);
}

std::vector<int> ChatHistory::tokens() const {
  std::vector<int> tokens = opening_;
  const auto add = [&tokens](const std::vector<int>& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
  };
  for (size_t t = 0; t < turns_.size(); ++t) {
    add(turns_[t].words);
    if (t + 1 == turns_.size()) break;
    add(turns_[t].answer);
    add(end_of_answer_);
  }
  return tokens;
}

}  // namespace kvx::tool
