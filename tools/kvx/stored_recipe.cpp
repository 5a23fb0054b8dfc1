// From the plan of every layer back to the shortest recipe and exceptions that give it.
#include "tools/kvx/stored_recipe.hpp"

#include <algorithm>

#include "kv/files/fingerprint.hpp"

namespace kvx::tool {
namespace {

using kv::HeadRunPlan;
using kv::LayerPlan;
using kv::SideRecipe;

// The options in which a side differs from its format's default, each behind `prefix`.
std::vector<std::string> options_of(const SideRecipe& side, std::string_view prefix) {
  const format::FormatSpec& spec = side.spec;
  const format::FormatSpec preferred = format::make_spec(spec.facts->id).value();
  std::vector<std::string> options;
  const auto add = [&](std::string option) {
    options.push_back(std::string(prefix) + std::move(option));
  };
  if (spec.group_size != preferred.group_size) add(fmt::format("g{}", spec.group_size));
  if (spec.scale_type != preferred.scale_type) {
    add(fmt::format("scale={}", name_of(spec.scale_type)));
  }
  if (spec.scale_rule != preferred.scale_rule) {
    const bool is_ceil = spec.scale_rule == format::ScaleRule::kE8M0Ceil;
    add(fmt::format("rule={}", is_ceil ? "ceil" : "floor"));
  }
  if (spec.scale_source != preferred.scale_source) {
    add(fmt::format("source={}", name_of(spec.scale_source)));
  }
  if (spec.scale_choice != preferred.scale_choice) add(std::string(name_of(spec.scale_choice)));
  if (side.hadamard) add("hadamard");
  return options;
}

// What a run of heads is stored as. The rotations are the layer's: a run has them for its text.
struct RunRecipe {
  SideRecipe k;
  SideRecipe v;
  format::FormatSpec rotary;
};

RunRecipe recipe_of(const LayerPlan& layer, const HeadRunPlan& run) {
  RunRecipe recipe{run.k, run.v, run.rotary};
  recipe.k.hadamard = layer.k_hadamard;
  recipe.v.hadamard = layer.v_hadamard;
  return recipe;
}

// "int4", "nvfp4:hadamard", "int8/int4:v.g32", "int4+bf16". window: further options, of the whole
// cache.
std::string recipe_text(const RunRecipe& run, const std::vector<std::string>& window) {
  const auto& [k, v, rotary] = run;
  std::string text(k.spec.facts->name);
  if (rotary != k.spec) text.append("+").append(rotary.facts->name);
  std::vector<std::string> options;
  if (k == v) {
    options = options_of(k, "");
  } else {
    if (k.spec.facts != v.spec.facts) text.append("/").append(v.spec.facts->name);
    options = options_of(k, "k.");
    for (std::string& option : options_of(v, "v.")) options.push_back(std::move(option));
  }
  options.insert(options.end(), window.begin(), window.end());
  for (size_t i = 0; i < options.size(); ++i) text += (i == 0 ? ":" : ",") + options[i];
  return text;
}

bool is_stored_alike(const LayerPlan& a, const LayerPlan& b) {
  if (a.k_hadamard != b.k_hadamard || a.v_hadamard != b.v_hadamard ||
      a.has_segments != b.has_segments) {
    return false;
  }
  return std::equal(a.runs.begin(), a.runs.end(), b.runs.begin(), b.runs.end(),
                    [](const HeadRunPlan& x, const HeadRunPlan& y) {
                      return x.num_heads == y.num_heads && x.k.spec == y.k.spec &&
                             x.v.spec == y.v.spec && x.rotary == y.rotary;
                    });
}

// The layer that most layers are stored like, one format for all heads if there is any such.
int base_layer(const std::vector<LayerPlan>& layers) {
  int base = 0;
  int64_t most = -1;
  for (size_t i = 0; i < layers.size(); ++i) {
    int64_t count = std::count_if(layers.begin(), layers.end(), [&](const LayerPlan& layer) {
      return is_stored_alike(layer, layers[i]);
    });
    if (layers[i].runs.size() == 1) count += std::ssize(layers);
    if (count <= most) continue;
    most = count;
    base = static_cast<int>(i);
  }
  return base;
}

std::vector<std::string> cache_options(const kv::StoredCache& stored) {
  const cache::FullPrecisionWindow& window = stored.full_precision_window;
  std::vector<std::string> options;
  if (stored.order != cache::BlockOrder::kHeads) {
    options.push_back(fmt::format("order={}", kv::name_of(stored.order)));
  }
  if (!window.is_on()) return options;
  if (window.sink_blocks > 0) {
    options.push_back(fmt::format("sink={}", window.sink_blocks * stored.block_size));
  }
  // One of the window's blocks is the open one, which recent=N does not count.
  options.push_back(fmt::format("recent={}", (window.recent_blocks - 1) * stored.block_size));
  const format::Facts& facts = *stored.full_precision_spec.facts;
  if (facts.id != format::FormatId::kBF16) {
    options.push_back(fmt::format("full_precision={}", facts.name));
  }
  return options;
}

// The exceptions of one layer: a recipe for all of it, and others for the heads that differ from
// its first run.
void add_exceptions(int index, const LayerPlan& layer, OverrideTexts& overrides, bool is_base) {
  const std::string whole = recipe_text(recipe_of(layer, layer.runs.front()), {});
  if (!is_base) overrides.layers.push_back(fmt::format("{}={}", index, whole));
  for (size_t r = 1; r < layer.runs.size(); ++r) {
    const HeadRunPlan& run = layer.runs[r];
    std::string where;
    for (int head = run.first_head; head < run.first_head + run.num_heads; ++head) {
      where += fmt::format("{}{}:{}", where.empty() ? "" : ",", index, head);
    }
    RunRecipe alone{run.k, run.v, run.rotary};
    alone.k.hadamard = alone.v.hadamard = false;  // heads keep their layer's
    overrides.heads.push_back(where + "=" + recipe_text(alone, {}));
  }
}

// Whether the options give the cache that was read.
bool is_same_cache(const StoredRecipe& found, const kv::StoredCache& stored) {
  const auto recipe = kv::parse_recipe(found.cache);
  const auto overrides = parse_overrides(found.overrides);
  if (!recipe.ok() || !overrides.ok()) return false;
  const auto layers = kv::plan_layers(stored.geometry, recipe.value(), overrides.value());
  if (!layers.ok()) return false;
  return std::equal(layers.value().begin(), layers.value().end(), stored.layers.begin(),
                    stored.layers.end(), is_stored_alike);
}

}  // namespace

std::string StoredRecipe::command_line() const {
  std::string text = "--cache " + cache;
  for (const std::string& layer : overrides.layers) text += " --layers " + layer;
  for (const std::string& head : overrides.heads) text += " --heads " + head;
  return text + fmt::format(" --block-size {}", block_size);
}

Result<StoredRecipe> stored_recipe(std::string_view fingerprint) {
  KVX_ASSIGN_OR_RETURN(const kv::StoredCache stored, kv::parse_fingerprint(fingerprint));
  if (stored.calibration != kv::calibration_name({})) {
    return unsupported("the cache had a tuned recipe's tables, which --cache tuned:FILE names");
  }
  const LayerPlan& base = stored.layers[base_layer(stored.layers)];
  StoredRecipe found;
  found.cache = recipe_text(recipe_of(base, base.runs.front()), cache_options(stored));
  found.block_size = stored.block_size;
  for (size_t i = 0; i < stored.layers.size(); ++i) {
    const LayerPlan& layer = stored.layers[i];
    const bool is_base = is_stored_alike(layer, base);
    if (is_base && base.runs.size() == 1) continue;
    add_exceptions(static_cast<int>(i), layer, found.overrides, is_base);
  }
  if (is_same_cache(found, stored)) return found;
  return unsupported("no recipe describes the file's cache");
}

}  // namespace kvx::tool
