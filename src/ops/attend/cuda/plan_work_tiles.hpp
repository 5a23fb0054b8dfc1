// Into which work tiles a call is cut, and how many warps a CTA has: from shapes and maxima alone,
// since a captured call serves every batch within its limits.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>

#include "core/checked.hpp"
#include "ops/attend/cuda/common/launch.hpp"
#include "ops/attend/cuda/latent/launch.hpp"
#include "ops/attend/cuda/prefill/launch.hpp"
#include "ops/attend/splits.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops::cuda {

// How the work of a run of heads is cut. decode_mma, latent and prefill: the run's instance, of
// which the cut depends; those that do not run have no function.
struct WorkTilePlan {
  DecodeMmaKernel decode_mma;
  LatentKernel latent;
  PrefillKernel prefill;
  int warps_of_cta = 0;  // decode_mma
  int heads_of_cta = 1;  // KV heads
  int num_row_tiles = 0;
  int num_splits = 1;
  int balanced_work_tiles = 0;     // of all sequences, for each KV head and tile of query rows;
                                   // 0: the device does not balance by lengths
  bool merges_in_cluster = false;  // the splits of a row are CTAs of one cluster
  bool splits_off_sinks = false;   // the sinks of a window are the first split

  // Whether a launch of its own merges the splits.
  bool is_merged() const {
    return (num_splits > 1 && !merges_in_cluster) || balanced_work_tiles > 0;
  }
};

// How many CTAs of so many warps the device runs at once.
inline int64_t tile_slots(const device::CudaDevice& device, const DecodeMmaKernel& kernel,
                          int warps) {
  const int cta_bytes = warps * kernel.warp_shared_bytes + device.reserved_shared_bytes;
  return int64_t{device.num_multiprocessors} *
         std::min(kernel.warps_at_once / warps, device.shared_bytes_per_multiprocessor / cta_bytes);
}

// How many CTAs a multiprocessor may run, the best first where plans cost the same: as measured.
using CtaOrder = std::array<int, 5>;
inline CtaOrder preferred_ctas(const DecodeMmaKernel& kernel, int head_dim, int block_size,
                               int64_t max_tokens, int most_heads, int window_sinks) {
  constexpr CtaOrder kOneFirst = {1, 2, 4, 8, 16};
  constexpr CtaOrder kTwoFirst = {2, 1, 4, 8, 16};
  constexpr CtaOrder kFourFirst = {4, 2, 1, 8, 16};
  constexpr CtaOrder kEightFirst = {8, 2, 1, 4, 16};
  constexpr int64_t kManyTokens = 4096;  // beside which a merge more is little
  if (kernel.rows != kNTileRows || max_tokens < kManyTokens) return kTwoFirst;
  // Neighbour heads are to stay side by side: their rows share lines.
  if (most_heads > 1) return kOneFirst;
  const bool has_four_bits = kernel.step_tokens == kSideStageTiles * kTileTokens;
  // Steps of a tile, in as many places of the memory as there are warps in a CTA.
  if (!has_four_bits) return block_size <= kTileTokens ? kFourFirst : kTwoFirst;
  // Bulk copies take small CTAs. But a window's sinks are a step more for a warp of the first
  // split, of which few warps feel more; and each split more is a beginning and an end.
  const bool has_long_ends = kernel.overhead_tokens > kernel.step_tokens;
  if (kernel.accepts_heads || window_sinks > 0 || has_long_ends) return kTwoFirst;
  return head_dim < 128 ? kFourFirst : kEightFirst;
}

// What a row's splits cost to merge, in tokens of a warp: as measured.
struct MergeCost {
  double any;
  double each;  // of the splits beyond the first
};
inline constexpr MergeCost kLaunchedMerge = {50, 0.6};
inline constexpr MergeCost kClusterMerge = {5, 2};

// Small CTAs fill the device more evenly and hide each other's beginnings and ends; large ones
// leave less to merge, and their warps keep pace. The first of the order that no later one is 2.5 %
// better than. Steps of a warp take the same time, and somewhat longer where a multiprocessor runs
// more of them.
//
// The CTAs of a row's splits may be a cluster and merge among themselves: that saves a launch, and
// the kernel behind it its cold instructions. All of them must run at once: clusters_at_once(
// warps_of_cta, ctas) says how many clusters do.
//
// most_heads: KV heads of a CTA, if it has the warps; shape counts work tiles of one head, and its
// most_splits are those that a launch merges.
template <class ClustersAtOnce>
void plan_decode_mma(const CudaContext& context, SplitShape shape, int most_heads,
                     const CtaOrder& order, const ClustersAtOnce& clusters_at_once,
                     WorkTilePlan& plan) {
  const DecodeMmaKernel& kernel = plan.decode_mma;
  const device::CudaDevice& device = context.device;
  constexpr int kMostOfCluster = 16;
  shape.crowding = 0.18;  // as measured: how much longer steps take on a full multiprocessor
  shape.overhead = static_cast<double>(kernel.overhead_tokens) / kernel.step_tokens;
  const int64_t work_tiles_of_heads = shape.num_work_tiles;
  const int most_launched_splits = shape.most_splits;
  double best_cost = 0;
  for (const int wanted_ctas : order) {
    const int warps = std::min(kernel.warps_at_once / wanted_ctas,
                               device.shared_bytes_per_cta / kernel.warp_shared_bytes);
    shape.num_slots = warps == 0 ? 0 : tile_slots(device, kernel, warps);
    if (shape.num_slots == 0) continue;
    shape.slots_at_a_place = static_cast<int>(shape.num_slots / device.num_multiprocessors);
    const int heads = std::gcd(most_heads, warps);
    shape.num_work_tiles = work_tiles_of_heads / heads;
    shape.granule = kernel.step_tokens * warps / heads;
    const auto plan_merged_by = [&](const MergeCost& merge, const auto& can_have) {
      shape.merge = merge.any / kernel.step_tokens;
      shape.merge_of_split = merge.each / kernel.step_tokens;
      return plan_splits(shape, can_have);
    };
    shape.most_splits = most_launched_splits;
    const SplitPlan launched = plan_merged_by(kLaunchedMerge, [](int) { return true; });
    shape.most_splits = kMostOfCluster;
    const SplitPlan cluster = plan_merged_by(kClusterMerge, [&](int num_splits) {
      return num_splits > 1 && shape.num_work_tiles * num_splits <= shape.num_slots &&
             shape.num_work_tiles <= clusters_at_once(warps, num_splits);
    });
    const bool is_cluster = cluster.num_splits > 0 && cluster.cost < launched.cost;
    const SplitPlan& splits = is_cluster ? cluster : launched;
    if (best_cost != 0 && splits.cost > 0.975 * best_cost) continue;
    plan.warps_of_cta = warps;
    plan.heads_of_cta = heads;
    plan.num_splits = splits.num_splits;
    plan.merges_in_cluster = is_cluster;
    best_cost = splits.cost;
  }
}

// A window's sinks: warps begin with them, a step each at most, which over full-precision window is
// a tile. More sinks than that are a split of their own. Requires: all else is planned.
inline void plan_sinks(int window_sinks, WorkTilePlan& plan) {
  if (window_sinks <= plan.warps_of_cta / plan.heads_of_cta * kTileTokens) return;
  plan.splits_off_sinks = true;
  ++plan.num_splits;
  plan.merges_in_cluster = false;
}

// A sequence of so many tokens may be much longer than the others of its batch.
inline constexpr int64_t kLongSequence = 16384;

// The longest sequence of a batch must not keep the device waiting. Where sequences may be long,
// each gets work tiles by its length, from a budget that is a few for each: in the smallest CTAs
// that fill the device, since then no work tile has to be short. most_work_tiles: the budget that
// the workspace has room for. Requires: planned without clusters.
inline void balance_decode_mma(const CudaContext& context, const SplitShape& shape,
                               int num_sequences, int most_heads, WorkTilePlan& plan,
                               int64_t most_work_tiles = INT64_MAX) {
  constexpr int64_t kWorkTilesOfSequence = 3;
  constexpr int64_t kMostCtas = int64_t{1} << 20;
  constexpr int kMostRowTiles = 4;  // many rows are work tiles enough, and cost workspace
  constexpr int kFewWarps = 8;      // for a sequence's KV head: sequences alone fill the device
  const DecodeMmaKernel& kernel = plan.decode_mma;
  const bool is_long = shape.max_tokens >= kLongSequence;
  if (num_sequences < 2 || !is_long || plan.num_row_tiles > kMostRowTiles) return;
  int64_t budget = int64_t{num_sequences} * plan.num_splits;
  int warps_of_cta = plan.warps_of_cta;
  int64_t num_work_tiles = shape.num_work_tiles / plan.heads_of_cta;
  if (plan.num_splits == 1 || plan.num_splits * warps_of_cta <= kFewWarps) {
    int64_t most_warps = 0, slots = 0;
    for (const int warps : {8, 4, 2, 1}) {
      const int64_t ctas = tile_slots(context.device, kernel, warps);
      if (ctas == 0 || warps < most_heads || ctas * warps < most_warps) continue;
      most_warps = ctas * warps;
      slots = ctas;
      warps_of_cta = warps;
    }
    if (slots == 0) return;
    num_work_tiles = shape.num_work_tiles / std::gcd(most_heads, warps_of_cta);
    const int64_t waves = ceil_div(kWorkTilesOfSequence * num_work_tiles, slots);
    budget = waves * slots / (num_work_tiles / num_sequences);
  }
  // A budget that the workspace limits is worth having while it is above one for each.
  int64_t least = 2 * int64_t{num_sequences};
  if (budget > most_work_tiles) {
    budget = most_work_tiles;
    least = ceil_div<int64_t>(5 * int64_t{num_sequences}, 4);
  }
  const int64_t num_ctas = budget * (num_work_tiles / num_sequences);
  if (budget < least || num_ctas > kMostCtas) return;
  plan.balanced_work_tiles = static_cast<int>(budget);
  plan.warps_of_cta = warps_of_cta;
  plan.heads_of_cta = std::gcd(most_heads, warps_of_cta);
}

// Long prompts have work tiles enough; a few rows on a long prefix are split.
inline void plan_prefill(const CudaContext& context, SplitShape shape, WorkTilePlan& plan) {
  const device::CudaDevice& device = context.device;
  const int cta_bytes = plan.prefill.shared_bytes + device.reserved_shared_bytes;
  shape.num_slots =
      int64_t{device.num_multiprocessors} *
      std::min(plan.prefill.ctas_at_once, device.shared_bytes_per_multiprocessor / cta_bytes);
  shape.granule = plan.prefill.step_tokens;
  plan.num_splits = shape.num_work_tiles >= shape.num_slots ? 1 : plan_splits(shape).num_splits;
}

}  // namespace kvx::ops::cuda
