// Cuts a list at the commas that separate recipes; kv::parse_recipe reads each recipe.
#include "tools/kvx/recipe_list.hpp"

#include "format/spec.hpp"

namespace kvx::tool {
namespace {

bool begins_a_recipe(std::string_view part) {
  return part.starts_with(tune::kTunedWord) ||
         format::format_named(part.substr(0, part.find_first_of(":/+"))).has_value();
}

std::string_view without_blanks_around(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t first = std::min(text.find_first_not_of(kBlanks), text.size());
  text.remove_prefix(first);
  return text.substr(0, text.find_last_not_of(kBlanks) + 1);
}

std::vector<std::string> cut_into_recipes(std::string_view text) {
  std::vector<std::string> recipes;
  size_t first = 0;
  while (first <= text.size()) {
    const size_t comma = std::min(text.find(',', first), text.size());
    const std::string part(without_blanks_around(text.substr(first, comma - first)));
    const bool has_options = !recipes.empty() && recipes.back().find(':') != std::string::npos;
    if (has_options && !begins_a_recipe(part)) {
      recipes.back() += "," + part;
    } else {
      recipes.push_back(part);
    }
    first = comma + 1;
  }
  return recipes;
}

}  // namespace

Result<std::vector<tune::CacheRecipe>> read_recipe_list(std::string_view text) {
  std::vector<tune::CacheRecipe> recipes;
  for (const std::string& one : cut_into_recipes(text)) {
    KVX_ASSIGN_OR_RETURN(tune::CacheRecipe recipe, tune::read_recipe(one));
    for (const tune::CacheRecipe& earlier : recipes) {
      if (earlier.recipe.text == one) {
        return invalid_argument("formats has '{}' twice; expected each once", one);
      }
    }
    recipes.push_back(std::move(recipe));
  }
  return recipes;
}

Result<std::vector<kv::Recipe>> parse_recipe_list(std::string_view text) {
  KVX_ASSIGN_OR_RETURN(std::vector<tune::CacheRecipe> with_tables, read_recipe_list(text));
  std::vector<kv::Recipe> recipes;
  for (tune::CacheRecipe& one : with_tables) {
    if (one.file) {
      return invalid_argument("formats has '{}'; this command has no model that it was tuned for",
                              one.recipe.text);
    }
    recipes.push_back(std::move(one.recipe));
  }
  return recipes;
}

Result<std::vector<kv::RecipeOverride>> parse_overrides(const OverrideTexts& texts) {
  std::vector<kv::RecipeOverride> overrides;
  for (const std::string& text : texts.layers) {
    KVX_ASSIGN_OR_RETURN(kv::RecipeOverride one, kv::parse_layer_override(text));
    overrides.push_back(std::move(one));
  }
  for (const std::string& text : texts.heads) {
    KVX_ASSIGN_OR_RETURN(kv::RecipeOverride one, kv::parse_head_override(text));
    overrides.push_back(std::move(one));
  }
  return overrides;
}

}  // namespace kvx::tool
