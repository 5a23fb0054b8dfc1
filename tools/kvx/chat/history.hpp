// ChatHistory: the turns of a chat as tokens, and which of them a context has room for.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvx::tool {

class ChatHistory {
 public:
  // opening: what stands before the first turn. end_of_answer: what follows an answer.
  ChatHistory(std::vector<int> opening, std::vector<int> end_of_answer)
      : opening_(std::move(opening)), end_of_answer_(std::move(end_of_answer)) {}

  // The user's words, up to where the answer begins.
  void add_turn(std::vector<int> words) { turns_.push_back({std::move(words), {}}); }
  // Requires: there is a turn.
  void set_answer(std::vector<int> tokens) { turns_.back().answer = std::move(tokens); }
  // Requires: there is a turn.
  void remove_last() { turns_.pop_back(); }
  void clear() { turns_.clear(); }

  // Forgets the oldest turns until the rest, with `room` tokens for an answer, fits the context.
  // The last turn needs room for one token alone. Returns the number of forgotten turns; none, and
  // nothing is forgotten, where the last turn does not fit by itself. Requires: there is a turn.
  std::optional<int> make_room(int64_t context, int64_t room);

  int num_turns() const { return static_cast<int>(turns_.size()); }
  // All of it, up to where the answer to the last turn begins.
  std::vector<int> tokens() const;

 private:
  struct Turn {
    std::vector<int> words;
    std::vector<int> answer;
  };
  // Of the turns from `first` on, behind the opening.
  int64_t count_tokens(size_t first) const;

  std::vector<int> opening_;
  std::vector<int> end_of_answer_;
  std::vector<Turn> turns_;
};

}  // namespace kvx::tool
