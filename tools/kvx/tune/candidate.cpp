// Candidates as texts, which kv::parse_recipe and its overrides read.
#include "tools/kvx/tune/candidate.hpp"

#include <utility>

namespace kvx::tool {
namespace {

// "0-2,5" of layers in order.
std::string ranges_text(const std::vector<int>& layers) {
  std::string text;
  for (size_t first = 0; first < layers.size();) {
    size_t last = first;
    while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) ++last;
    text += text.empty() ? "" : ",";
    text += last == first ? fmt::format("{}", layers[first])
                          : fmt::format("{}-{}", layers[first], layers[last]);
    first = last + 1;
  }
  return text;
}

// A layer's recipe: its formats with what the cache's recipe does to each side. A searched scale
// belongs to few bits: with eight nothing is left to gain, and it takes time.
Result<std::string> layer_recipe(const LayerFormats& formats, const kv::Recipe& recipe) {
  std::string options;
  const auto add = [&](const kv::SideRecipe& side, const std::string& format,
                       const char* name) -> Status {
    if (side.hadamard) options += fmt::format("{}{}.hadamard", options.empty() ? ":" : ",", name);
    const std::string choice(name_of(side.spec.scale_choice));
    KVX_ASSIGN_OR_RETURN(const kv::Recipe plain, kv::parse_recipe(format));
    const bool has_few_bits = plain.k.spec.facts->element_bits <= 4;
    if (side.spec.scale_choice == format::ScaleChoice::kAmax || !has_few_bits) return {};
    if (!kv::parse_recipe(format + ":" + choice).ok()) return {};
    options += fmt::format("{}{}.{}", options.empty() ? ":" : ",", name, choice);
    return {};
  };
  KVX_RETURN_IF_ERROR(add(recipe.k, formats.k, "k"));
  KVX_RETURN_IF_ERROR(add(recipe.v, formats.v, "v"));
  return formats.text() + options;
}

}  // namespace

LayerFormats formats_of(const kv::Recipe& recipe) {
  return {std::string(recipe.k.spec.facts->name), std::string(recipe.v.spec.facts->name)};
}

std::string Candidate::recipe_with(const std::string& option) const {
  return recipe + (recipe.find(':') == std::string::npos ? ":" : ",") + option;
}

Result<std::vector<std::string>> Candidate::override_texts() const {
  KVX_ASSIGN_OR_RETURN(const kv::Recipe whole, kv::parse_recipe(recipe));
  std::map<std::string, std::vector<int>> layers_of;
  for (const auto& [layer, formats] : layers) {
    KVX_ASSIGN_OR_RETURN(const std::string text, layer_recipe(formats, whole));
    layers_of[text].push_back(layer);
  }
  std::vector<std::string> texts;
  for (const auto& [text, of_text] : layers_of) texts.push_back(ranges_text(of_text) + "=" + text);
  return texts;
}

Result<ReadCandidate> read_candidate(const Candidate& candidate) {
  ReadCandidate read;
  KVX_ASSIGN_OR_RETURN(read.recipe, kv::parse_recipe(candidate.recipe));
  KVX_ASSIGN_OR_RETURN(const std::vector<std::string> texts, candidate.override_texts());
  for (const std::string& text : texts) {
    KVX_ASSIGN_OR_RETURN(kv::RecipeOverride one, kv::parse_layer_override(text));
    read.overrides.push_back(std::move(one));
  }
  return read;
}

}  // namespace kvx::tool
