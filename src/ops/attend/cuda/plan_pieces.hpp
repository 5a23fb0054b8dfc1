// Into which pieces a call is cut, and how many warps a CTA has: from shapes and maxima alone,
// since a captured call serves every batch within its limits.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>

#include "core/checked.hpp"
#include "ops/attend/cuda/launch.hpp"
#include "ops/attend/cuda/prefill_launch.hpp"
#include "ops/attend/splits.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops::cuda {

struct AttendPlanCuda {
  TileKernel tiles;  // no function in either: the plain kernel, whose pieces are always merged
  PrefillKernel prefill;
  int warps_of_cta = 0;
  int heads_of_cta = 1;
  int num_row_tiles = 0;
  int num_splits = 1;
  int balanced_pieces = 0;         // of all sequences, a KV head and tile of rows; 0: not balanced
  bool merges_in_cluster = false;  // a row's splits are a cluster of CTAs
  bool splits_off_sinks = false;   // of a window: the first split
  bool is_plain() const { return !tiles.function && !prefill.function; }
  bool is_merged() const { return (num_splits > 1 && !merges_in_cluster) || balanced_pieces > 0; }
};

// How many CTAs of so many warps the device runs at once.
inline int64_t tile_slots(const device::CudaDevice& device, const TileKernel& kernel, int warps) {
  const int cta_bytes = warps * kernel.warp_shared_bytes + device.reserved_shared_bytes;
  return int64_t{device.num_multiprocessors} *
         std::min(kernel.warps_at_once / warps, device.shared_bytes_per_multiprocessor / cta_bytes);
}

// How many CTAs a multiprocessor may run, the best first where plans cost the same: as measured.
using CtaOrder = std::array<int, 5>;
inline CtaOrder preferred_ctas(const TileKernel& kernel, int head_dim, int64_t max_tokens,
                               int most_heads, int window_sinks) {
  constexpr CtaOrder kTwoFirst = {2, 1, 4, 8, 16};
  constexpr int64_t kManyTokens = 4096;  // beside which a merge more is little
  const bool has_four_bits = kernel.step_tokens == kSideStepTiles * kTileTokens;
  const bool is_large = head_dim >= 128 && max_tokens >= kManyTokens;
  if (!has_four_bits || kernel.rows != kTileRows || !is_large) return kTwoFirst;
  // Neighbour heads are to stay side by side: their rows share lines.
  if (most_heads > 1) return {1, 2, 4, 8, 16};
  // Bulk copies take small CTAs. But a window's sinks are a step more for a warp of the first
  // split, of which few warps feel more.
  return kernel.takes_heads || window_sinks > 0 ? kTwoFirst : CtaOrder{8, 2, 1, 4, 16};
}

// Small CTAs fill the device more evenly and hide each other's beginnings and ends; large ones
// leave less to merge, and their warps keep pace. The first of the order that no later one is 3 %
// better than. Steps of a warp take the same time in all. Returns the best plan's cost in such
// steps, or 0 if there is none.
//
// most_heads: KV heads of a CTA, if it has the warps; shape counts pieces of one head. can_have(
// warps_of_cta, num_splits, num_pieces): whether the device takes such a plan.
template <class CanHave>
double plan_tiles(const CudaContext& context, SplitShape shape, int most_heads,
                  const CtaOrder& order, const CanHave& can_have, AttendPlanCuda& plan) {
  const TileKernel& kernel = plan.tiles;
  const device::CudaDevice& device = context.device;
  constexpr double kOverheadTokens = 40;  // of a warp: what a piece's beginning and end cost
  shape.overhead = kOverheadTokens / kernel.step_tokens;
  const int64_t pieces_of_heads = shape.num_pieces;
  double best_cost = 0;
  for (const int wanted_ctas : order) {
    const int warps = std::min(kernel.warps_at_once / wanted_ctas,
                               device.shared_bytes_per_cta / kernel.warp_shared_bytes);
    shape.num_slots = warps == 0 ? 0 : tile_slots(device, kernel, warps);
    if (shape.num_slots == 0) continue;
    const int heads = std::gcd(most_heads, warps);
    shape.num_pieces = pieces_of_heads / heads;
    shape.granule = kernel.step_tokens * warps / heads;
    const SplitPlan splits = plan_splits(shape);
    if (best_cost != 0 && splits.cost > 0.97 * best_cost) continue;
    if (!can_have(warps, splits.num_splits, shape.num_pieces)) continue;
    plan.warps_of_cta = warps;
    plan.heads_of_cta = heads;
    plan.num_splits = splits.num_splits;
    best_cost = splits.cost;
  }
  return best_cost;
}

// The CTAs of a row's splits may be a cluster and merge among themselves. That saves a launch, and
// the kernel behind it its cold instructions: so much is worth longer pieces. All of them must run
// at once: clusters_at_once(warps_of_cta, ctas) says how many clusters do.
template <class ClustersAtOnce>
void plan_clusters(const CudaContext& context, SplitShape shape, int most_heads,
                   const CtaOrder& order, double merged_cost,
                   const ClustersAtOnce& clusters_at_once, AttendPlanCuda& plan) {
  constexpr int kMostOfCluster = 16;
  constexpr double kMergeTokens = 20;  // of a warp: what the merge's launch costs
  shape.most_splits = kMostOfCluster;
  const auto can_have = [&](int warps, int num_splits, int64_t num_pieces) {
    return num_splits > 1 && num_pieces <= clusters_at_once(warps, num_splits);
  };
  AttendPlanCuda clusters = plan;
  const double cost = plan_tiles(context, shape, most_heads, order, can_have, clusters);
  if (cost == 0 || cost > merged_cost + kMergeTokens / plan.tiles.step_tokens) return;
  plan = clusters;
  plan.merges_in_cluster = true;
}

// A window's sinks: warps begin with them, a step each at most, which over wide ends is a tile.
// More sinks than that are a split of their own. Requires: all else is planned.
inline void plan_sinks(int window_sinks, AttendPlanCuda& plan) {
  if (window_sinks <= plan.warps_of_cta / plan.heads_of_cta * kTileTokens) return;
  plan.splits_off_sinks = true;
  ++plan.num_splits;
  plan.merges_in_cluster = false;
}

// The longest sequence of a batch must not keep the device waiting. Where sequences may be long,
// each gets pieces by its length, from a budget that is a few for each: in the smallest CTAs that
// fill the device, since then no piece has to be short.
inline void balance_tiles(const CudaContext& context, const SplitShape& shape, int num_sequences,
                          int most_heads, AttendPlanCuda& plan) {
  constexpr int64_t kLong = 16384;
  constexpr int64_t kPiecesOfSequence = 3;
  constexpr int64_t kMostCtas = int64_t{1} << 20;
  constexpr int kMostRowTiles = 4;  // many rows are pieces enough, and cost workspace
  constexpr int kFewWarps = 8;      // for a sequence's KV head: sequences alone fill the device
  const TileKernel& kernel = plan.tiles;
  if (num_sequences < 2 || shape.max_tokens < kLong || plan.num_row_tiles > kMostRowTiles) return;
  int64_t budget = int64_t{num_sequences} * plan.num_splits;
  int warps_of_cta = plan.warps_of_cta;
  int64_t num_pieces = shape.num_pieces / plan.heads_of_cta;
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
    num_pieces = shape.num_pieces / std::gcd(most_heads, warps_of_cta);
    const int64_t waves = ceil_div(kPiecesOfSequence * num_pieces, slots);
    budget = waves * slots / (num_pieces / num_sequences);
  }
  const int64_t num_ctas = budget * (num_pieces / num_sequences);
  if (budget < 2 * int64_t{num_sequences} || num_ctas > kMostCtas) return;
  plan.balanced_pieces = static_cast<int>(budget);
  plan.warps_of_cta = warps_of_cta;
  plan.heads_of_cta = std::gcd(most_heads, warps_of_cta);
}

// Long prompts have pieces enough; a few rows on a long prefix are split.
inline void plan_prefill(const CudaContext& context, SplitShape shape, AttendPlanCuda& plan) {
  const device::CudaDevice& device = context.device;
  const int cta_bytes = plan.prefill.shared_bytes + device.reserved_shared_bytes;
  shape.num_slots =
      int64_t{device.num_multiprocessors} *
      std::min(plan.prefill.ctas_at_once, device.shared_bytes_per_multiprocessor / cta_bytes);
  shape.granule = plan.prefill.step_tokens;
  plan.num_splits = shape.num_pieces >= shape.num_slots ? 1 : plan_splits(shape).num_splits;
}

}  // namespace kvx::ops::cuda
