// Candidate: a cache that tuning may choose: a recipe, other formats for some layers or their
// heads, and which tables it is calibrated with.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kv/recipe.hpp"
#include "tools/kvx/recipe_list.hpp"
#include "tune/fit.hpp"

namespace kvx::tool {

// Formats of K and V, as "int8" and "int4".
struct KvFormats {
  std::string k;
  std::string v;

  std::string text() const { return k == v ? k : k + "/" + v; }
  friend auto operator<=>(const KvFormats&, const KvFormats&) = default;
};

struct Candidate {
  std::string recipe;  // kv::parse_recipe() reads it
  // Layers that have other formats than the recipe: [num_kv_heads], or one entry for all heads.
  std::map<int, std::vector<KvFormats>> layers;
  tune::FitOptions fit;

  // The recipe with one more option.
  std::string recipe_with(const std::string& option) const;
  // "3,7-9=int8/int4:k.hadamard" for layers whose heads are alike, "2:0,2:1=int8" for heads of the
  // others. Formats that several have share a text.
  Result<OverrideTexts> override_texts() const;

  friend bool operator==(const Candidate&, const Candidate&) = default;
};

// The formats that a recipe names.
KvFormats formats_of(const kv::Recipe& recipe);

// What the parts of a candidate mean.
struct ReadCandidate {
  kv::Recipe recipe;
  std::vector<kv::RecipeOverride> overrides;
};
Result<ReadCandidate> read_candidate(const Candidate& candidate);

}  // namespace kvx::tool
