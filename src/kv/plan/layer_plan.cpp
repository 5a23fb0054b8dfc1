// plan_layers gives every head its recipe, then joins equal neighbours into runs.
#include "kv/plan/layer_plan.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace kvx::kv {
namespace {

struct HeadPlan {
  SideRecipe k;
  SideRecipe v;
  std::optional<format::FormatSpec> rotary;

  // Without a format of their own, rotary numbers are stored as the others; scales that are given
  // are those of the others alone.
  format::FormatSpec rotary_spec() const {
    format::FormatSpec spec = rotary ? *rotary : k.spec;
    if (spec.scale_source == format::ScaleSource::kGiven) {
      spec.scale_source = format::ScaleSource::kComputed;
    }
    return spec;
  }
};

Status check_count(std::string_view field, int value, int low, int high) {
  if (value >= low && value <= high) return {};
  return invalid_argument("{} is {}; expected {} to {}", field, value, low, high);
}

// A latent cache stores V as a part of K's rows, so both are stored alike.
Status check_latent(const CacheGeometry& geometry, const HeadPlan& head) {
  if (head.v.spec != head.k.spec || (head.v.hadamard && !head.k.hadamard)) {
    return invalid_argument(
        "recipe stores K as {} and V as {} with other options or in another format; a latent cache "
        "has one row for both: expected one format and no options for one side",
        head.k.spec.facts->name, head.v.spec.facts->name);
  }
  if (head.rotary && geometry.rotary_dim() == 0) {
    return invalid_argument(
        "recipe has a format for rotary numbers, {}; v_head_dim is {}, all of K's row: expected "
        "one format",
        head.rotary->facts->name, geometry.v_head_dim);
  }
  return {};
}

Status check_head_dims(const CacheGeometry& geometry, const HeadPlan& head, bool has_segments) {
  if (geometry.is_latent) {
    KVX_RETURN_IF_ERROR(check_latent(geometry, head));
  } else if (head.rotary) {
    return invalid_argument(
        "recipe has a format for rotary numbers, {}, behind '+'; only a latent cache's rows have "
        "such",
        head.rotary->facts->name);
  }
  if (has_segments) {
    KVX_RETURN_IF_ERROR(format::check_head_dim(head.rotary_spec(), geometry.rotary_dim()));
  } else {
    KVX_RETURN_IF_ERROR(format::check_head_dim(head.k.spec, geometry.k_head_dim));
  }
  if (geometry.v_head_dim == 0) return {};
  return format::check_head_dim(head.v.spec, geometry.v_head_dim);
}

// One layer while overrides are applied to it.
struct LayerDraft {
  std::vector<HeadPlan> heads;
  bool k_hadamard;
  bool v_hadamard;

  bool has_segments(const CacheGeometry& geometry) const {
    if (geometry.rotary_dim() == 0) return false;
    const auto is_mixed = [](const HeadPlan& head) {
      return head.rotary && *head.rotary != head.k.spec;
    };
    return k_hadamard || std::ranges::any_of(heads, is_mixed);
  }

  void take(const Recipe& recipe, int head) {
    if (head >= 0) {
      heads[head] = {recipe.k, recipe.v, recipe.rotary};
      return;
    }
    for (HeadPlan& plan : heads) plan = {recipe.k, recipe.v, recipe.rotary};
    k_hadamard = recipe.k.hadamard;
    v_hadamard = recipe.v.hadamard;
  }
};

Status apply(const RecipeOverride& change, const CacheGeometry& geometry,
             std::vector<LayerDraft>& layers) {
  for (const LayerHead& place : change.where) {
    if (place.layer < 0 || place.layer >= geometry.num_layers) {
      return invalid_argument("layer is {}; the cache has layers 0 to {}", place.layer,
                              geometry.num_layers - 1);
    }
    if (place.head >= geometry.num_kv_heads) {
      return invalid_argument("head is {}; a layer has KV heads 0 to {}", place.head,
                              geometry.num_kv_heads - 1);
    }
    layers[place.layer].take(change.recipe, place.head);
  }
  return {};
}

LayerPlan join_equal_neighbours(const LayerDraft& layer, const CacheGeometry& geometry) {
  LayerPlan plan{{}, layer.k_hadamard, layer.v_hadamard, layer.has_segments(geometry)};
  if (geometry.is_latent) plan.v_hadamard = plan.k_hadamard;  // V is in K's row
  for (int head = 0; head < static_cast<int>(layer.heads.size()); ++head) {
    const HeadPlan& next = layer.heads[head];
    const format::FormatSpec rotary = plan.has_segments ? next.rotary_spec() : next.k.spec;
    const bool continues = !plan.runs.empty() && plan.runs.back().k.spec == next.k.spec &&
                           plan.runs.back().v.spec == next.v.spec &&
                           plan.runs.back().rotary == rotary;
    if (continues) {
      ++plan.runs.back().num_heads;
    } else {
      plan.runs.push_back({head, 1, next.k, next.v, rotary});
    }
  }
  return plan;
}

}  // namespace

Status check_geometry(const CacheGeometry& geometry) {
  constexpr int kMaxLayers = 1 << 14;
  constexpr int kMaxHeads = 1 << 14;
  KVX_RETURN_IF_ERROR(check_count("num_layers", geometry.num_layers, 1, kMaxLayers));
  KVX_RETURN_IF_ERROR(check_count("num_kv_heads", geometry.num_kv_heads, 1, kMaxHeads));
  KVX_RETURN_IF_ERROR(check_count("k_head_dim", geometry.k_head_dim, 1, format::kMaxHeadDim));
  KVX_RETURN_IF_ERROR(check_count("v_head_dim", geometry.v_head_dim, 0, format::kMaxHeadDim));
  if (geometry.is_latent) {
    KVX_RETURN_IF_ERROR(check_count("v_head_dim", geometry.v_head_dim, 1, geometry.k_head_dim));
  }
  const int num_windows = static_cast<int>(geometry.layer_windows.size());
  if (num_windows != 0 && num_windows != geometry.num_layers) {
    return invalid_argument("layer_windows has {} entries; expected none or num_layers, {}",
                            num_windows, geometry.num_layers);
  }
  for (int window : geometry.layer_windows) {
    if (window < 0) return invalid_argument("layer window is {}; expected 0 or more", window);
  }
  const int num_sinks = static_cast<int>(geometry.layer_sinks.size());
  if (num_sinks != 0 && num_sinks != geometry.num_layers) {
    return invalid_argument("layer_sinks has {} entries; expected none or num_layers, {}",
                            num_sinks, geometry.num_layers);
  }
  for (int layer = 0; layer < num_sinks; ++layer) {
    const int sinks = geometry.sinks_of(layer);
    const int window = geometry.window_of(layer);
    if (sinks >= 0 && (sinks == 0 || window > 0)) continue;
    return invalid_argument(
        "layer_sinks[{}] is {} with a window of {}; expected 0 or more, 0 "
        "without a window",
        layer, sinks, window);
  }
  return {};
}

Result<std::vector<LayerPlan>> plan_layers(const CacheGeometry& geometry, const Recipe& recipe,
                                           std::span<const RecipeOverride> overrides) {
  KVX_RETURN_IF_ERROR(check_geometry(geometry));
  const HeadPlan head{recipe.k, recipe.v, recipe.rotary};
  const LayerDraft as_recipe{std::vector<HeadPlan>(geometry.num_kv_heads, head), recipe.k.hadamard,
                             recipe.v.hadamard};
  std::vector<LayerDraft> drafts(geometry.num_layers, as_recipe);
  for (const RecipeOverride& change : overrides) {
    KVX_RETURN_IF_ERROR(apply(change, geometry, drafts));
  }
  std::vector<LayerPlan> plans;
  for (const LayerDraft& draft : drafts) {
    const bool has_segments = draft.has_segments(geometry);
    for (const HeadPlan& of_head : draft.heads) {
      KVX_RETURN_IF_ERROR(check_head_dims(geometry, of_head, has_segments));
    }
    plans.push_back(join_equal_neighbours(draft, geometry));
  }
  return plans;
}

}  // namespace kvx::kv
