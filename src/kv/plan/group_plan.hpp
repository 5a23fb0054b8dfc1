// GroupPlan: the layers that share block ids, and the records of their packed and full-precision
// blocks.
#pragma once

#include <span>
#include <vector>

#include "cache/account.hpp"
#include "cache/block_layout.hpp"
#include "kv/plan/layer_plan.hpp"

namespace kvx::kv {

// Layers of one sliding window (or of none) and as many sinks. Their index in `layers` is their
// index in the layouts.
struct GroupPlan {
  int window = 0;  // tokens; 0: every token is read
  int sinks = 0;   // tokens, with a window
  std::vector<int> layers;
  cache::FullPrecisionWindow
      full_precision_window;  // the recipe's; a window's sinks are in its head
  cache::BlockLayout packed;
  cache::BlockLayout full_precision;  // no layers without full-precision window
};

// Groups in the order of their first layers. INVALID_ARGUMENT: a block_size outside its range or
// one that a format cannot do, a dual-scale format without a full-precision window, or sizes that
// overflow.
Result<std::vector<GroupPlan>> plan_groups(const CacheGeometry& geometry,
                                           std::span<const LayerPlan> layers, const Recipe& recipe,
                                           int block_size);

// As the memory account wants them; they point into the groups.
std::vector<cache::GroupSizes> sizes_of(std::span<const GroupPlan> groups);

// All off when the recipe has none.
Result<cache::FullPrecisionWindow> full_precision_window_of(const Recipe& recipe, int block_size);

}  // namespace kvx::kv
