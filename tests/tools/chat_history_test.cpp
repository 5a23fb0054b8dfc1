// What a chat keeps when its context is full.
#include "tools/kvx/chat/history.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvx::tool {
namespace {

using ::testing::ElementsAre;

ChatHistory three_turns() {
  ChatHistory history({1}, {9});
  history.add_turn({2, 3});
  history.set_answer({4});
  history.add_turn({5, 6});
  history.set_answer({7});
  history.add_turn({8});
  return history;
}

TEST(ChatHistory, JoinsOpeningTurnsAndAnswers) {
  EXPECT_THAT(three_turns().tokens(), ElementsAre(1, 2, 3, 4, 9, 5, 6, 7, 9, 8));
}

TEST(ChatHistory, KeepsAllThatFits) {
  ChatHistory history = three_turns();
  EXPECT_EQ(history.make_room(12, 2), 0);
  EXPECT_EQ(history.num_turns(), 3);
}

TEST(ChatHistory, ForgetsTheOldestTurnsFirst) {
  ChatHistory history = three_turns();
  EXPECT_EQ(history.make_room(11, 2), 1);
  EXPECT_THAT(history.tokens(), ElementsAre(1, 5, 6, 7, 9, 8));
  EXPECT_EQ(history.make_room(7, 2), 1);
  EXPECT_THAT(history.tokens(), ElementsAre(1, 8));
}

TEST(ChatHistory, GivesTheLastTurnAShortAnswerRatherThanNone) {
  ChatHistory history = three_turns();
  EXPECT_EQ(history.make_room(3, 2), 2);
  EXPECT_THAT(history.tokens(), ElementsAre(1, 8));
}

TEST(ChatHistory, ForgetsNothingForATurnThatDoesNotFitByItself) {
  ChatHistory history = three_turns();
  history.set_answer({0});
  history.add_turn({10, 11, 12, 13});
  EXPECT_EQ(history.make_room(5, 1), std::nullopt);
  EXPECT_EQ(history.num_turns(), 4);
  history.remove_last();
  EXPECT_EQ(history.num_turns(), 3);
}

}  // namespace
}  // namespace kvx::tool
