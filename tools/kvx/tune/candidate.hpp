// Candidate: a cache that tuning may choose: a recipe, other formats for some layers, and which
// tables it is calibrated with.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kv/recipe.hpp"
#include "tune/fit.hpp"

namespace kvx::tool {

// Formats of K and V of a layer, as "int8" and "int4".
struct LayerFormats {
  std::string k;
  std::string v;

  std::string text() const { return k == v ? k : k + "/" + v; }
  friend bool operator==(const LayerFormats&, const LayerFormats&) = default;
};

struct Candidate {
  std::string recipe;                  // kv::parse_recipe() reads it
  std::map<int, LayerFormats> layers;  // where they are not the recipe's
  tune::FitOptions fit;

  // The recipe with one more option.
  std::string recipe_with(const std::string& option) const;
  // "3,7-9=int8/int4:k.hadamard", a text for all layers of the same formats.
  Result<std::vector<std::string>> override_texts() const;

  friend bool operator==(const Candidate&, const Candidate&) = default;
};

// The formats that a recipe names.
LayerFormats formats_of(const kv::Recipe& recipe);

// What the parts of a candidate mean.
struct ReadCandidate {
  kv::Recipe recipe;
  std::vector<kv::RecipeOverride> overrides;
};
Result<ReadCandidate> read_candidate(const Candidate& candidate);

}  // namespace kvx::tool
