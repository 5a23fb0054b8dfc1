// Lists of recipes on the command line: "bf16,int8/int4,nvfp4:hadamard,sink=16,tuned:FILE".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/result.hpp"
#include "tune/tuned_recipe.hpp"

namespace kvx::tool {

// Commas separate recipes and a recipe's options alike; blanks around them are dropped. What stands
// between two commas begins a new recipe when its first word is a format's name or "tuned", or when
// the recipe before it has no options yet; otherwise it is one more option. INVALID_ARGUMENT: a
// recipe is wrong, or stands there twice; or what reading a tuned recipe's file gives.
Result<std::vector<tune::CacheRecipe>> read_recipe_list(std::string_view text);

// The same without tuned recipes, for commands that have no model. INVALID_ARGUMENT names one.
Result<std::vector<kv::Recipe>> parse_recipe_list(std::string_view text);

// --layers and --heads, as they were given; each may stand several times.
struct OverrideTexts {
  std::vector<std::string> layers;  // "0,1=bf16"
  std::vector<std::string> heads;   // "2:0,2:1=int8"
};
Result<std::vector<kv::RecipeOverride>> parse_overrides(const OverrideTexts& texts);

}  // namespace kvx::tool
