// Options of the recipe first, then tables, then scales, which depend on all before.
#include "tools/kvx/tune/options.hpp"

#include <utility>

namespace kvx::tool {
namespace {

using format::ScaleSource;

bool reads_given_scales(const kv::SideRecipe& side) {
  return side.spec.has_scale() && side.spec.scale_source == ScaleSource::kGiven;
}

bool any_side(const kv::Recipe& recipe, bool (*is)(const kv::SideRecipe&)) {
  return is(recipe.k) || is(recipe.v);
}

// An option of the recipe, where it changes one.
TuningOption recipe_option(const std::string& name) {
  return {name, [name](Candidate& candidate) -> Result<bool> {
            KVX_ASSIGN_OR_RETURN(const kv::Recipe before, kv::parse_recipe(candidate.recipe));
            // A searched scale replaces a given one, which the option was not asked to do.
            if (name == "search" && any_side(before, reads_given_scales)) return false;
            const std::string text = candidate.recipe_with(name);
            const Result<kv::Recipe> after = kv::parse_recipe(text);
            if (!after.ok()) return false;
            if (after.value().k == before.k && after.value().v == before.v) return false;
            candidate.recipe = text;
            return true;
          }};
}

// A table of K or V, where that side is quantised.
TuningOption table_option(const std::string& name, bool tune::FitOptions::*field, bool is_k) {
  return {name, [field, is_k](Candidate& candidate) -> Result<bool> {
            KVX_ASSIGN_OR_RETURN(const kv::Recipe recipe, kv::parse_recipe(candidate.recipe));
            if (!(is_k ? recipe.k : recipe.v).spec.has_scale()) return false;
            // The mean after RoPE is what block offsets say better.
            const bool is_there =
                field == &tune::FitOptions::k_mean && candidate.fit.k_block_offset;
            return !is_there && !std::exchange(candidate.fit.*field, true);
          }};
}

TuningOption tensor_scale_option(const std::string& name, tune::TensorScaleRule rule) {
  return {name, [rule](Candidate& candidate) -> Result<bool> {
            KVX_ASSIGN_OR_RETURN(const kv::Recipe recipe, kv::parse_recipe(candidate.recipe));
            const auto has_one = [](const kv::SideRecipe& side) {
              return side.spec.facts->has_tensor_scale;
            };
            if (!any_side(recipe, has_one)) return false;
            candidate.fit.tensor_scales = rule;
            return true;
          }};
}

TuningOption given_option(const std::string& name, double percentile) {
  return {name, [percentile](Candidate& candidate) -> Result<bool> {
            KVX_ASSIGN_OR_RETURN(const kv::Recipe recipe, kv::parse_recipe(candidate.recipe));
            const tune::FitOptions before = candidate.fit;
            candidate.fit.given_scales = true;
            candidate.fit.percentile = percentile;
            return any_side(recipe, reads_given_scales) && candidate.fit != before;
          }};
}

// Formats other than fp8 have no scale of their own where they read a given one.
bool needs_given_scales(const kv::SideRecipe& side) {
  return reads_given_scales(side) &&
         side.spec.facts->scale_sources.preferred() != ScaleSource::kGiven;
}

}  // namespace

Result<Candidate> untuned(const std::string& recipe) {
  KVX_ASSIGN_OR_RETURN(const kv::Recipe parsed, kv::parse_recipe(recipe));
  Candidate candidate;
  candidate.recipe = recipe;
  candidate.fit.given_scales = any_side(parsed, needs_given_scales);
  return candidate;
}

std::vector<TuningOption> options_of(double percentile) {
  using tune::FitOptions;
  using tune::TensorScaleRule;
  return {
      recipe_option("k.hadamard"),
      recipe_option("search"),
      table_option("K's block offset", &FitOptions::k_block_offset, true),
      table_option("K's error feedback", &FitOptions::k_feedback, true),
      table_option("V's mean", &FitOptions::v_mean, false),
      recipe_option("v.hadamard"),
      table_option("K's mean", &FitOptions::k_mean, true),
      table_option("K's factor", &FitOptions::k_factor, true),
      tensor_scale_option("tensor scales amax/448", TensorScaleRule::kAmaxBy448),
      tensor_scale_option("tensor scales amax/(6*448)", TensorScaleRule::kAmaxBy6By448),
      given_option("given scales at the maximum", 100),
      given_option(fmt::format("given scales at {} %", percentile), percentile),
  };
}

}  // namespace kvx::tool
