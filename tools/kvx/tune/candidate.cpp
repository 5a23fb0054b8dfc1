// Candidates as texts, which kv::parse_recipe and its overrides read.
#include "tools/kvx/tune/candidate.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>

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

// A file limits the length of a text; these places stay far below it.
constexpr size_t kMostHeadsInAText = 128;

// The formats with what the cache's recipe does to each side; a rotation belongs to a whole layer.
// A searched scale belongs to few bits: with eight nothing is left to gain, and it takes time.
Result<std::string> override_recipe(const KvFormats& formats, const kv::Recipe& recipe,
                                    bool is_whole_layer) {
  std::string options;
  const auto add = [&](const kv::SideRecipe& side, const std::string& format,
                       const char* name) -> Status {
    if (side.hadamard && is_whole_layer) {
      options += fmt::format("{}{}.hadamard", options.empty() ? ":" : ",", name);
    }
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

// "2:0,2:1=int8", in texts of kMostHeadsInAText at most.
void add_head_texts(const std::vector<std::string>& places, const std::string& recipe,
                    std::vector<std::string>& texts) {
  for (size_t first = 0; first < places.size(); first += kMostHeadsInAText) {
    const size_t end = std::min(places.size(), first + kMostHeadsInAText);
    texts.push_back(fmt::format("{}={}",
                                fmt::join(places.begin() + static_cast<std::ptrdiff_t>(first),
                                          places.begin() + static_cast<std::ptrdiff_t>(end), ","),
                                recipe));
  }
}

}  // namespace

KvFormats formats_of(const kv::Recipe& recipe) {
  return {std::string(recipe.k.spec.facts->name), std::string(recipe.v.spec.facts->name)};
}

std::string Candidate::recipe_with(const std::string& option) const {
  return recipe + (recipe.find(':') == std::string::npos ? ":" : ",") + option;
}

Result<OverrideTexts> Candidate::override_texts() const {
  KVX_ASSIGN_OR_RETURN(const kv::Recipe whole, kv::parse_recipe(recipe));
  std::map<KvFormats, std::vector<int>> layers_of;
  std::map<KvFormats, std::vector<std::string>> heads_of;
  for (const auto& [layer, heads] : layers) {
    if (std::ranges::adjacent_find(heads, std::not_equal_to()) == heads.end()) {
      layers_of[heads.front()].push_back(layer);
      continue;
    }
    for (size_t head = 0; head < heads.size(); ++head) {
      if (heads[head] == formats_of(whole)) continue;
      heads_of[heads[head]].push_back(fmt::format("{}:{}", layer, head));
    }
  }
  OverrideTexts texts;
  for (const auto& [formats, of_formats] : layers_of) {
    KVX_ASSIGN_OR_RETURN(const std::string text, override_recipe(formats, whole, true));
    texts.layers.push_back(fmt::format("{}={}", ranges_text(of_formats), text));
  }
  for (const auto& [formats, places] : heads_of) {
    KVX_ASSIGN_OR_RETURN(const std::string text, override_recipe(formats, whole, false));
    add_head_texts(places, text, texts.heads);
  }
  return texts;
}

Result<ReadCandidate> read_candidate(const Candidate& candidate) {
  ReadCandidate read;
  KVX_ASSIGN_OR_RETURN(read.recipe, kv::parse_recipe(candidate.recipe));
  KVX_ASSIGN_OR_RETURN(const OverrideTexts texts, candidate.override_texts());
  KVX_ASSIGN_OR_RETURN(read.overrides, parse_overrides(texts));
  return read;
}

}  // namespace kvx::tool
