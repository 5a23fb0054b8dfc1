// SessionNodes: whose a node is.
#include "cache/prefix/session_nodes.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvx::cache {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(SessionNodes, ANodeIsItsMakersUntilAnotherFindsIt) {
  SessionNodes sessions(8);
  const int32_t a = sessions.join("a");
  const int32_t b = sessions.join("b");
  for (int32_t node : {3, 5, 6}) sessions.add(node, a);
  EXPECT_THAT(sessions.nodes_of(a), ElementsAre(6, 5, 3));
  EXPECT_FALSE(sessions.share(5, a));
  EXPECT_TRUE(sessions.share(5, b));
  EXPECT_FALSE(sessions.share(5, b)) << "it is nobody's by now";
  EXPECT_TRUE(sessions.share(6, kNoSession));
  EXPECT_THAT(sessions.nodes_of(a), ElementsAre(3));
  EXPECT_THAT(sessions.nodes_of(b), IsEmpty());
}

TEST(SessionNodes, ASessionLivesAsLongAsItHasSequencesOrNodes) {
  SessionNodes sessions(8);
  const int32_t a = sessions.join("a");
  EXPECT_EQ(sessions.join("a"), a);
  sessions.join(a);
  EXPECT_EQ(sessions.num_sequences(a), 3);
  sessions.add(1, a);
  for (int i = 0; i < 3; ++i) sessions.leave(a);
  EXPECT_EQ(sessions.find("a"), a);
  sessions.drop(1);
  EXPECT_EQ(sessions.find("a"), kNoSession);
  EXPECT_EQ(sessions.join("other"), a) << "its place is used again";
  EXPECT_THAT(sessions.nodes_of(a), IsEmpty());
}

TEST(SessionNodes, CostsNothingWhileNobodyNamesOne) {
  SessionNodes sessions(1000);
  EXPECT_EQ(sessions.join(""), kNoSession);
  sessions.join(kNoSession);
  sessions.leave(kNoSession);
  sessions.add(1, kNoSession);
  EXPECT_FALSE(sessions.share(1, kNoSession));
  sessions.drop(1);
  EXPECT_EQ(sessions.metadata_bytes(), 0);
}

}  // namespace
}  // namespace kvx::cache
