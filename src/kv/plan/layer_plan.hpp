// LayerPlan: what a recipe and its overrides mean for one layer: runs of heads that are stored
// alike.
#pragma once

#include <span>
#include <vector>

#include "kv/recipe.hpp"

namespace kvx::kv {

struct CacheGeometry {
  int num_layers = 0;
  int num_kv_heads = 0;
  int k_head_dim = 0;
  int v_head_dim = 0;  // 0: nothing is stored for V
  // [num_layers]: a layer's sliding window in tokens, 0 for all. Empty: all layers see everything.
  // Layers of one window form a layer group with block tables of its own.
  std::vector<int> layer_windows = {};

  // [num_layers]: in a layer with a window, the sequence's first tokens that every query sees too
  // (attention sinks, as in StreamingLLM); 0 in the others. Empty: none.
  std::vector<int> layer_sinks = {};

  // A latent cache (MLA): V is the first v_head_dim numbers of K's rows, which are stored once.
  bool is_latent = false;

  // Numbers of a latent row that are K's alone.
  int rotary_dim() const { return is_latent ? k_head_dim - v_head_dim : 0; }
  // Numbers of a row that V takes beside K's.
  int stored_v_head_dim() const { return is_latent ? 0 : v_head_dim; }
  int window_of(int layer) const { return layer_windows.empty() ? 0 : layer_windows[layer]; }
  int sinks_of(int layer) const { return layer_sinks.empty() ? 0 : layer_sinks[layer]; }
};

// INVALID_ARGUMENT: a count outside its range, layer_windows or layer_sinks of another
// length than num_layers, sinks without a window, a latent V that is longer than K.
Status check_geometry(const CacheGeometry& geometry);

struct HeadRunPlan {
  int first_head = 0;
  int num_heads = 0;
  SideRecipe k;
  SideRecipe v;
  format::FormatSpec rotary = {};  // of a latent row behind V; K's spec without segments
};

struct LayerPlan {
  std::vector<HeadRunPlan> runs;  // in head order, covering all heads
  // A rotation belongs to the whole layer: it is the recipe's, or that of an override of the whole
  // layer.
  bool k_hadamard = false;
  bool v_hadamard = false;
  // Latent rows are two segments, V's numbers and the rotary ones: in two formats, or with a
  // rotation, which is of V's numbers alone. Transforms and tables are of the first segment.
  bool has_segments = false;
};

// One plan a layer. INVALID_ARGUMENT: an override of a layer or head that does not exist, a
// head_dim that a format can't do, K and V in two formats in a latent cache, or rotary numbers in
// any other.
Result<std::vector<LayerPlan>> plan_layers(const CacheGeometry& geometry, const Recipe& recipe,
                                           std::span<const RecipeOverride> overrides);

}  // namespace kvx::kv
