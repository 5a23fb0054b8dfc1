// Recipe: how a whole cache stores keys and values, named by one string everywhere.
//
//   recipe = format ["/" format] [":" option {"," option}]        K and V, or one format for both
//          | format "+" format [":" option {"," option}]          the two parts of a latent row
//   int8      int8/int4      nvfp4:k.hadamard,search,sink=16,recent=64      int4:auto
//   nvfp4+bf16      int8+bf16:auto
//
// A latent cache (MLA) has one row for K and V: V, then the rotary numbers, which are K's alone.
// An option applies to both sides where their formats take it; "k." or "v." in front limits it to
// one side.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/block_layout.hpp"
#include "core/result.hpp"
#include "format/spec.hpp"

namespace kvx::kv {

// How K or V is stored once it is quantised.
struct SideRecipe {
  format::FormatSpec spec;
  bool hadamard = false;

  friend bool operator==(const SideRecipe&, const SideRecipe&) = default;
};

struct Recipe {
  std::string text;  // as it was given
  SideRecipe k;
  SideRecipe v;
  // Of a latent row's rotary numbers; none: as its other numbers, in one segment with them.
  std::optional<format::FormatSpec> rotary;
  // Full-precision window: the first sink_tokens and at least the recent_tokens before every
  // query's own stay in full_precision_spec, in whole blocks, and so does the open block; a block
  // is quantised when it leaves the window. Without a window every append is immediate.
  bool has_full_precision_window = false;
  int sink_tokens = 0;
  int recent_tokens = 0;
  format::FormatSpec full_precision_spec;
  cache::BlockOrder order = cache::BlockOrder::kHeads;  // of packed blocks
};

// "heads" and "turbomind", as order= takes them.
std::string_view name_of(cache::BlockOrder order);

// INVALID_ARGUMENT names the part of the text that is wrong, and what was expected there.
Result<Recipe> parse_recipe(std::string_view text);

// INVALID_ARGUMENT: the recipe has a format for rotary numbers, which only latent caches have.
Status check_no_rotary(const Recipe& recipe);

// The recipe with another full-precision window: options of recipe_options(), separated by commas,
// of which sink, recent, full_precision and immediate are taken. INVALID_ARGUMENT: any other.
Result<Recipe> with_window_options(Recipe recipe, std::string_view options);

// Another recipe for some layers, or for some heads of layers; it has no full-precision window of
// its own.
struct LayerHead {
  int layer = 0;
  int head = -1;  // -1: all heads of the layer
};
struct RecipeOverride {
  std::vector<LayerHead> where;
  Recipe recipe;
};

// "0,1=bf16" or "0-3,29=int8/int4".
Result<RecipeOverride> parse_layer_override(std::string_view text);
// "2:0,2:1=int8", layer:head.
Result<RecipeOverride> parse_head_override(std::string_view text);

// The options, for help texts.
struct OptionHelp {
  std::string_view form;  // "sink=N"
  std::string_view help;
};
std::span<const OptionHelp> recipe_options();

// The options that `auto` stands for with this format, as they would be written; empty for the
// 16-bit formats and f32.
std::string_view recommended_options(format::FormatId id);

}  // namespace kvx::kv
