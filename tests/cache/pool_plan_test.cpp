// plan_pool: a budget counts every region, and says what one sequence needs.
#include "cache/pool/pool_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>
#include <limits>

namespace kvx::cache::pool_plan_test {
namespace {

using testing::ElementsAre;

std::string refusal(int64_t budget, const std::vector<ClassDemand>& demands) {
  const auto plan = plan_pool(budget, demands);
  return plan.ok() ? "accepted" : plan.error().message;
}

TEST(PlanPool, FillsTheBudgetWithOneClass) {
  const std::vector<ClassDemand> demands = {{"packed", 100, 8}};
  const auto plan = plan_pool(1999, demands);
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan.value().num_blocks, ElementsAre(19));
  EXPECT_EQ(plan.value().bytes, 1900);
  EXPECT_EQ(plan.value().num_sequences, 2);
}

TEST(PlanPool, SharesTheBudgetAsOneSequenceDoes) {
  const std::vector<ClassDemand> demands = {
      {"packed", 100, 30}, {"full_precision", 400, 2}, {"none", 9, 0}};
  const auto plan = plan_pool(10 * 3800, demands);
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan.value().num_blocks, ElementsAre(300, 20, 0));
  EXPECT_EQ(plan.value().num_sequences, 10);
}

TEST(PlanPool, SaysHowManyBytesOneSequenceNeeds) {
  const std::vector<ClassDemand> demands = {{"packed", 100, 30}, {"full_precision", 400, 2}};
  EXPECT_EQ(refusal(3799, demands), "budget_bytes is 3799; one sequence needs 3800");
  EXPECT_EQ(refusal(-1, demands), "budget_bytes is -1; one sequence needs 3800");
  EXPECT_EQ(refusal(3800, demands), "accepted");
}

TEST(PlanPool, NamesTheClassAndFieldThatAreWrong) {
  EXPECT_EQ(refusal(1000, {{"packed", 0, 1}}),
            "block_bytes of class 'packed' is 0; expected 1 or more");
  EXPECT_EQ(refusal(1000, {{"packed", 64, -1}}),
            "blocks_per_sequence of class 'packed' is -1; expected 0 or more");
  EXPECT_EQ(refusal(1000, {{"packed", 64, 0}}),
            "blocks_per_sequence is 0 in all 1 classes; expected one above 0");
  EXPECT_EQ(refusal(1000, {{"packed", int64_t{1} << 40, int64_t{1} << 40}}),
            "blocks_per_sequence of 1 classes: the bytes of one sequence do not fit in 63 bits");
}

TEST(PlanPool, NeverPlansMoreBlocksThanIdsCount) {
  const std::vector<ClassDemand> demands = {{"packed", 1, 1}};
  const auto plan = plan_pool(std::numeric_limits<int64_t>::max(), demands);
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan.value().num_blocks, ElementsAre(std::numeric_limits<int32_t>::max()));
  EXPECT_EQ(plan.value().num_sequences, std::numeric_limits<int32_t>::max());
}

TEST(PlanPool, StaysWithinTheBudgetAndHoldsItsSequences) {
  EXPECT_TRUE(rc::check([](uint32_t budget) {
    std::vector<ClassDemand> demands(*rc::gen::inRange<size_t>(1, 4));
    for (ClassDemand& demand : demands) {
      demand.block_bytes = *rc::gen::inRange<int64_t>(1, 5000);
      demand.blocks_per_sequence = *rc::gen::inRange<int64_t>(0, 50);
    }
    int64_t sequence_bytes = 0;
    for (const auto& demand : demands) {
      sequence_bytes += demand.block_bytes * demand.blocks_per_sequence;
    }
    const auto plan = plan_pool(budget, demands);
    RC_ASSERT(plan.ok() == (sequence_bytes > 0 && sequence_bytes <= budget));
    if (!plan.ok()) return;
    RC_ASSERT(plan.value().num_sequences == budget / sequence_bytes);
    int64_t bytes = 0;
    for (size_t i = 0; i < demands.size(); ++i) {
      bytes += plan.value().num_blocks[i] * demands[i].block_bytes;
      RC_ASSERT(plan.value().num_blocks[i] >=
                plan.value().num_sequences * demands[i].blocks_per_sequence);
    }
    RC_ASSERT(bytes == plan.value().bytes);
    RC_ASSERT(bytes <= budget);
  }));
}

}  // namespace
}  // namespace kvx::cache::pool_plan_test
