// How calls are cut into work tiles, for an H200 as it describes itself: needs no GPU, but CUDA's
// headers.
#if KVX_HAS_CUDA
#include "ops/attend/cuda/plan_work_tiles.hpp"

#include <gtest/gtest.h>

namespace kvx::tests::plan_work_tiles_test {
namespace {

using namespace ops::cuda;
using ops::SplitShape;

ops::CudaContext h200() {
  ops::CudaContext context;
  context.device.num_multiprocessors = 132;
  context.device.shared_bytes_per_multiprocessor = 228 << 10;
  context.device.shared_bytes_per_cta = 227 << 10;
  context.device.reserved_shared_bytes = 1 << 10;
  return context;
}

// As int4's instance for up to eight query rows.
WorkTilePlan plan_of_four_bits() {
  WorkTilePlan plan;
  plan.decode_mma.rows = 8;
  plan.decode_mma.warps_at_once = 16;
  plan.decode_mma.warp_shared_bytes = 13 << 10;
  plan.decode_mma.step_tokens = 64;
  plan.num_row_tiles = 1;
  return plan;
}

// What cudaOccupancyMaxActiveClusters returns on an H200, as far as it was called (4, 8, 10 and 12
// to 16 CTAs of 16 warps, 8, 10 and 12 to 16 of 8): seven groups of multiprocessors, and what is
// left takes clusters of eight at most.
int h200_clusters(int warps_of_cta, int ctas) {
  const int ctas_at_once = 16 / warps_of_cta;
  int clusters = 0;
  for (const int multiprocessors : {18, 18, 16, 16, 16, 16, 16}) {
    clusters += multiprocessors * ctas_at_once / ctas;
  }
  return clusters + (ctas <= 8 ? 8 * ctas_at_once / ctas : 0);
}
int no_clusters(int, int) {
  return 0;
}

template <class ClustersAtOnce>
WorkTilePlan plan_for(int num_sequences, int64_t tokens, const ClustersAtOnce& clusters,
                      int window_sinks = 0) {
  constexpr int kHeads = 8;
  SplitShape shape;
  shape.num_work_tiles = int64_t{num_sequences} * kHeads;
  shape.max_tokens = tokens;
  WorkTilePlan plan = plan_of_four_bits();
  const CtaOrder order = preferred_ctas(plan.decode_mma, 128, 64, tokens, 1, window_sinks);
  plan_decode_mma(h200(), shape, 1, order, no_clusters, plan);
  balance_decode_mma(h200(), shape, num_sequences, 1, plan);
  if (plan.balanced_work_tiles == 0) plan_decode_mma(h200(), shape, 1, order, clusters, plan);
  return plan;
}

TEST(PlanWorkTiles, HaveCtasThatAMultiprocessorHolds) {
  for (const int sequences : {1, 2, 4, 16, 64, 256}) {
    for (const int64_t tokens : {1, 128, 1024, 8192, 32768, 131072}) {
      const WorkTilePlan plan = plan_for(sequences, tokens, h200_clusters);
      SCOPED_TRACE(testing::Message() << sequences << " x " << tokens);
      EXPECT_GE(plan.warps_of_cta, 1);
      EXPECT_LE(plan.warps_of_cta, plan.decode_mma.warps_at_once);
      EXPECT_GT(tile_slots(h200().device, plan.decode_mma, plan.warps_of_cta), 0);
      EXPECT_LE(plan.num_splits, ops::kMaxSplits);
      if (!plan.merges_in_cluster) continue;
      EXPECT_LE(plan.num_splits, 16);
      EXPECT_LE(sequences * 8, h200_clusters(plan.warps_of_cta, plan.num_splits));
      EXPECT_FALSE(plan.is_merged()) << "no launch for the merge";
    }
  }
}

TEST(PlanWorkTiles, OfAFewShortSequencesMergeInTheirCluster) {
  EXPECT_TRUE(plan_for(4, 1024, h200_clusters).merges_in_cluster);
  EXPECT_TRUE(plan_for(1, 8192, h200_clusters).merges_in_cluster);
  const WorkTilePlan without = plan_for(1, 8192, no_clusters);
  EXPECT_FALSE(without.merges_in_cluster);
  EXPECT_TRUE(without.is_merged());
}

// Where the best number of splits is more than clusters take, fewer may still beat a launch.
TEST(PlanWorkTiles, MergeInSmallerClustersWhereLargeOnesDoNotRunAtOnce) {
  const auto of_four = [](int, int ctas) { return ctas <= 4 ? 16 : 0; };
  EXPECT_GT(plan_for(1, 4096, h200_clusters).num_splits, 4);
  const WorkTilePlan plan = plan_for(1, 4096, of_four);
  EXPECT_TRUE(plan.merges_in_cluster);
  EXPECT_EQ(plan.num_splits, 4);
}

// A sequence's head for each multiprocessor: nothing is gained by two CTAs that share one.
TEST(PlanWorkTiles, OfAsManyHeadsAsMultiprocessorsAreNotSplit) {
  const WorkTilePlan plan = plan_for(16, 1024, h200_clusters);
  EXPECT_EQ(plan.num_splits, 1);
  EXPECT_EQ(plan.warps_of_cta, 16);
}

// Eight clusters of 10 to 16 CTAs that fill a multiprocessor each do not run at once; smaller ones
// would leave much of the device without work.
TEST(PlanWorkTiles, OfOneLongSequenceAreMergedByALaunch) {
  const WorkTilePlan plan = plan_for(1, 131072, h200_clusters);
  EXPECT_FALSE(plan.merges_in_cluster);
  EXPECT_TRUE(plan.is_merged());
  EXPECT_GE(plan.num_splits * 8 * plan.warps_of_cta, 132 * 15) << "the device is full";
}

// As of dual-scale blocks, whose stages are few bytes.
TEST(PlanWorkTiles, WithLongBeginningsAndEndsAreOneWave) {
  WorkTilePlan plan = plan_of_four_bits();
  plan.decode_mma.overhead_tokens = 256;
  SplitShape shape;
  shape.num_work_tiles = 64 * 8;
  shape.max_tokens = 8192;
  const CtaOrder order = preferred_ctas(plan.decode_mma, 128, 64, shape.max_tokens, 1, 0);
  plan_decode_mma(h200(), shape, 1, order, h200_clusters, plan);
  EXPECT_EQ(plan.num_splits, 1);
  EXPECT_EQ(plan.warps_of_cta, 4) << "512 of 528 CTAs";
}

TEST(PlanWorkTiles, OfFourBitsAreInCtasOfTwoWarps) {
  const WorkTilePlan plan = plan_for(64, 8192, h200_clusters);
  EXPECT_EQ(plan.warps_of_cta, 2);
  EXPECT_EQ(plan.num_splits, 2);
}

TEST(PlanWorkTiles, PreferTheSizeOfCtasThatSuitsTheRows) {
  const DecodeMmaKernel four_bits = plan_of_four_bits().decode_mma;
  DecodeMmaKernel eight_bits = four_bits, many_rows = four_bits, with_gaps = four_bits;
  eight_bits.step_tokens = 16;
  many_rows.rows = 16;
  with_gaps.accepts_heads = true;
  const auto ctas = [](const DecodeMmaKernel& kernel, int head_dim, int64_t tokens, int heads = 1,
                       int sinks = 0, int block_size = 64) {
    return preferred_ctas(kernel, head_dim, block_size, tokens, heads, sinks)[0];
  };
  EXPECT_EQ(ctas(four_bits, 128, 8192), 8);
  EXPECT_EQ(ctas(four_bits, 64, 8192), 4);
  EXPECT_EQ(ctas(four_bits, 128, 129), 2) << "a short window";
  EXPECT_EQ(ctas(four_bits, 128, 8192, 1, 4), 2) << "sinks";
  EXPECT_EQ(ctas(eight_bits, 128, 8192), 2);
  EXPECT_EQ(ctas(eight_bits, 128, 8192, 1, 0, 16), 4) << "short blocks";
  EXPECT_EQ(ctas(many_rows, 128, 8192), 2);
  EXPECT_EQ(ctas(with_gaps, 128, 8192), 2);
  EXPECT_EQ(ctas(with_gaps, 128, 8192, 4), 1) << "neighbour heads";
  EXPECT_EQ(ctas(with_gaps, 128, 129, 4), 2);
  eight_bits.accepts_heads = true;
  EXPECT_EQ(ctas(eight_bits, 64, 8192, 4, 0, 16), 1);
}

TEST(PlanWorkTiles, OfAWindowHaveItsFirstTokensToo) {
  const WorkTilePlan window = plan_for(64, 4096, h200_clusters, 4);
  ASSERT_EQ(window.num_splits, 1);
  const int most = 16 * window.warps_of_cta;  // a tile a warp
  for (const int sinks : {0, 4, most}) {
    WorkTilePlan plan = window;
    plan_sinks(sinks, plan);
    EXPECT_FALSE(plan.splits_off_sinks || plan.is_merged()) << sinks;
  }
  WorkTilePlan plan = window;
  plan_sinks(most + 1, plan);
  EXPECT_TRUE(plan.splits_off_sinks && plan.is_merged());
  EXPECT_EQ(plan.num_splits, 2);
}

// The launch that merges merges what the split of the sinks stores.
TEST(PlanWorkTiles, OfManySinksAreNotMergedInAClusterOfTheOthers) {
  WorkTilePlan plan = plan_for(4, 1024, h200_clusters);
  ASSERT_TRUE(plan.merges_in_cluster);
  const int num_splits = plan.num_splits;
  plan_sinks(16 * 16 + 1, plan);
  EXPECT_EQ(plan.num_splits, num_splits + 1);
  EXPECT_TRUE(plan.is_merged());
}

TEST(PlanWorkTiles, OfManySequencesAreNotSplit) {
  const WorkTilePlan plan = plan_for(256, 1024, h200_clusters);
  EXPECT_EQ(plan.num_splits, 1);
  EXPECT_FALSE(plan.is_merged());
}

// From 16384 tokens on the device cuts by length, from a budget of the host's.
TEST(PlanWorkTiles, AreBalancedWhereSequencesMayBeLong) {
  EXPECT_EQ(plan_for(64, 8192, h200_clusters).balanced_work_tiles, 0);
  EXPECT_EQ(plan_for(1, 32768, h200_clusters).balanced_work_tiles, 0);
  const WorkTilePlan few = plan_for(16, 32768, h200_clusters);
  EXPECT_EQ(few.balanced_work_tiles, 16 * few.num_splits) << "one wave, which is full";
  const WorkTilePlan plan = plan_for(64, 32768, h200_clusters);
  EXPECT_GE(plan.balanced_work_tiles, 3 * 64) << "shares that are even";
  EXPECT_FALSE(plan.merges_in_cluster);
  EXPECT_TRUE(plan.is_merged());
}

}  // namespace
}  // namespace kvx::tests::plan_work_tiles_test
#endif
