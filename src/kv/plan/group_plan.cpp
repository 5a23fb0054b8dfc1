// plan_groups sorts layers by window and lays out a block record for each kind of block.
#include "kv/plan/group_plan.hpp"

#include <algorithm>

#include "kv/plan/layer_store.hpp"

namespace kvx::kv {
namespace {

// Blocks of a dual-scale format are of some sizes, and come out of a full-precision window.
Status check_dual(const format::FormatSpec& spec, const Recipe& recipe, int block_size,
                  bool is_latent) {
  if (!spec.is_dual()) return {};
  KVX_RETURN_IF_ERROR(format::check_block_size(spec, block_size));
  if (is_latent) {
    return unsupported("recipe is '{}'; a latent cache reads parts of rows, and {} only whole ones",
                       recipe.text, spec.facts->name);
  }
  if (recipe.has_full_precision_window) return {};
  return invalid_argument(
      "recipe is '{}'; {} quantises blocks as they leave a full-precision window: add recent=N, or "
      "auto",
      recipe.text, spec.facts->name);
}

}  // namespace

Result<std::vector<GroupPlan>> plan_groups(const CacheGeometry& geometry,
                                           std::span<const LayerPlan> layers, const Recipe& recipe,
                                           int block_size) {
  KVX_ASSIGN_OR_RETURN(const cache::FullPrecisionWindow in_full,
                       full_precision_window_of(recipe, block_size));
  for (const LayerPlan& layer : layers) {
    for (const HeadRunPlan& run : layer.runs) {
      KVX_RETURN_IF_ERROR(check_dual(run.k.spec, recipe, block_size, geometry.is_latent));
      if (layer.has_segments) {
        KVX_RETURN_IF_ERROR(check_dual(run.rotary, recipe, block_size, geometry.is_latent));
      }
      if (geometry.stored_v_head_dim() == 0) continue;
      KVX_RETURN_IF_ERROR(check_dual(run.v.spec, recipe, block_size, false));
    }
  }
  std::vector<GroupPlan> groups;
  for (int layer = 0; layer < geometry.num_layers; ++layer) {
    const int window = geometry.window_of(layer);
    const int sinks = geometry.sinks_of(layer);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const GroupPlan& g) {
      return g.window == window && g.sinks == sinks;
    });
    if (group == groups.end()) {
      group = groups.insert(groups.end(), {window, sinks, {}, in_full, {}, {}});
      if (in_full.is_on()) {
        group->full_precision_window.sink_blocks =
            std::max(in_full.sink_blocks, cache::blocks_for(sinks, block_size));
      }
    }
    group->layers.push_back(layer);
  }
  for (GroupPlan& group : groups) {
    cache::GroupBytes packed{block_size, {}, recipe.order};
    cache::GroupBytes full_precision{block_size, {}};
    for (int layer : group.layers) {
      packed.layers.push_back(packed_bytes(geometry, layers[layer]));
      full_precision.layers.push_back(full_precision_bytes(geometry, recipe.full_precision_spec));
    }
    KVX_ASSIGN_OR_RETURN(group.packed, cache::layout_block(packed));
    if (!recipe.has_full_precision_window) continue;
    KVX_ASSIGN_OR_RETURN(group.full_precision, cache::layout_block(full_precision));
  }
  return groups;
}

std::vector<cache::GroupSizes> sizes_of(std::span<const GroupPlan> groups) {
  std::vector<cache::GroupSizes> sizes;
  for (const GroupPlan& group : groups) {
    sizes.push_back({&group.packed,
                     group.full_precision_window.is_on() ? &group.full_precision : nullptr,
                     group.full_precision_window, group.window, group.sinks});
  }
  return sizes;
}

Result<cache::FullPrecisionWindow> full_precision_window_of(const Recipe& recipe, int block_size) {
  if (!recipe.has_full_precision_window) return cache::FullPrecisionWindow{};
  return cache::make_full_precision_window(recipe.sink_tokens, recipe.recent_tokens, block_size);
}

}  // namespace kvx::kv
