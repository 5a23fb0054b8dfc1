// How calls over latent rows are cut into work tiles, for an H200 as it describes itself: needs no
// GPU, but CUDA's headers.
#if KVX_HAS_CUDA
#include "ops/attend/cuda/latent/plan_latent.hpp"

#include <gtest/gtest.h>

namespace kvx::tests::plan_latent_test {
namespace {

using namespace ops::cuda;

WorkTilePlan plan_for(int num_sequences, int64_t tokens, int num_heads, int window = 0) {
  ops::CudaContext context;
  context.device.num_multiprocessors = 132;
  ops::AttendArgs args;
  args.num_sequences = num_sequences;
  args.window = window;
  WorkTilePlan plan;
  plan.latent.rows = kLatentRows;
  plan.latent.step_tokens = kLatentStepTokens;
  plan.num_row_tiles = static_cast<int>(ceil_div(num_heads, kLatentRows));
  ops::SplitShape shape;
  shape.num_work_tiles = int64_t{num_sequences} * plan.num_row_tiles;
  shape.max_tokens = tokens;
  constexpr int64_t kMostParts = 32000;
  plan_latent(context, args, shape, kMostParts, plan);
  return plan;
}

TEST(PlanLatent, DoesNotSplitWhatFillsTheDevice) {
  const WorkTilePlan plan = plan_for(64, 8192, 128);
  EXPECT_EQ(plan.num_splits, 1);
  EXPECT_FALSE(plan.is_merged());
}

TEST(PlanLatent, SplitsFewSequencesUntilTheDeviceIsFull) {
  EXPECT_EQ(plan_for(64, 8192, 16).num_splits, 2);
  for (const int heads : {16, 128}) {
    const WorkTilePlan plan = plan_for(1, 131072, heads);
    const int work_tiles = plan.num_splits * plan.num_row_tiles;
    EXPECT_GE(work_tiles, 128) << heads;
    EXPECT_LE(work_tiles, 132) << heads;
    EXPECT_TRUE(plan.is_merged());
  }
}

TEST(PlanLatent, DoesNotSplitAStep) {
  EXPECT_EQ(plan_for(1, kLatentStepTokens, 128).num_splits, 1);
}

TEST(PlanLatent, SharesABudgetOutWhereSequencesMayBeLong) {
  const WorkTilePlan plan = plan_for(64, 32768, 128);
  EXPECT_GE(plan.balanced_work_tiles, 2 * 64);
  EXPECT_LE(int64_t{plan.balanced_work_tiles} * plan.num_row_tiles * kLatentRows, 32000);
  EXPECT_EQ(plan_for(64, 16383, 128).balanced_work_tiles, 0);
  EXPECT_EQ(plan_for(1, 32768, 128).balanced_work_tiles, 0) << "no sequence is longer than others";
  EXPECT_EQ(plan_for(64, 32768, 128, 20000).balanced_work_tiles, 0) << "a window";
}

}  // namespace
}  // namespace kvx::tests::plan_latent_test
#endif
