// parse_fingerprint: reads the lines of fingerprint_of() in their order.
#include <charconv>

#include "format/list.hpp"
#include "kv/files/fingerprint.hpp"

namespace kvx::kv {
namespace {

std::string_view take_until(std::string_view& text, std::string_view separator) {
  const size_t end = text.find(separator);
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + separator.size());
  return part;
}

Error not_understood(std::string_view what, std::string_view value, std::string_view expected) {
  return {ErrorCode::kInvalidArgument,
          fmt::format("the fingerprint's {} is '{}'; expected {}", what, value, expected)};
}

Result<int> number_of(std::string_view what, std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size()) return number;
  return not_understood(what, text, "a number");
}

// The value of the next line, which must have this name.
Result<std::string_view> take_fact(std::string_view& text, std::string_view name) {
  const std::string_view found = take_until(text, " ");
  if (found != name) return not_understood("next fact", found, name);
  return take_until(text, "\n");
}

Result<int> take_number(std::string_view& text, std::string_view name) {
  KVX_ASSIGN_OR_RETURN(const std::string_view value, take_fact(text, name));
  return number_of(name, value);
}

// The one of a format's choices that has this name.
template <class T>
Result<T> choice_named(std::string_view what, std::string_view name,
                       const format::Choices<T>& choices) {
  for (int i = 0; i < choices.count; ++i) {
    if (name_of(choices.values[i]) == name) return choices.values[i];
  }
  return not_understood(what, name, "what its format has");
}

// nvfp4:g16:e4m3:amax:computed:search[:hadamard]
struct ParsedSide {
  SideRecipe recipe;
  bool hadamard = false;
};
Result<ParsedSide> parse_side(std::string_view text) {
  const std::string_view name = take_until(text, ":");
  const auto id = format::format_named(name);
  if (!id) return not_understood("format", name, "one of this library's");
  const format::Facts& facts = format::facts_of(*id);
  format::SpecOptions options;
  const std::string_view group = take_until(text, ":");
  if (!group.starts_with('g')) return not_understood("group size", group, "g and a number");
  KVX_ASSIGN_OR_RETURN(options.group_size, number_of("group size", group.substr(1)));
  KVX_ASSIGN_OR_RETURN(options.scale_type,
                       choice_named("scale type", take_until(text, ":"), facts.scale_types));
  KVX_ASSIGN_OR_RETURN(options.scale_rule,
                       choice_named("scale rule", take_until(text, ":"), facts.scale_rules));
  KVX_ASSIGN_OR_RETURN(options.scale_source,
                       choice_named("scale source", take_until(text, ":"), facts.scale_sources));
  using format::ScaleChoice;
  constexpr format::Choices<ScaleChoice> kAll{
      {ScaleChoice::kAmax, ScaleChoice::k4Over6, ScaleChoice::kSearch}, 3};
  KVX_ASSIGN_OR_RETURN(options.scale_choice,
                       choice_named("scale choice", take_until(text, ":"), kAll));
  if (!text.empty() && text != "hadamard") return not_understood("transform", text, "hadamard");
  ParsedSide side;
  KVX_ASSIGN_OR_RETURN(side.recipe.spec, format::make_spec(facts, options));
  side.hadamard = !text.empty();
  return side;
}

// K's numbers, in one segment or two, and V, which a latent cache has in them.
Status check_row(const HeadRunPlan& run, const LayerPlan& layer, const CacheGeometry& geometry) {
  if (geometry.is_latent) {
    const bool is_one_row = run.k.spec == run.v.spec && layer.k_hadamard == layer.v_hadamard;
    if (!is_one_row) return not_understood("V", run.v.spec.facts->name, "K's, in a latent cache");
    const bool needs_segments = layer.k_hadamard && geometry.rotary_dim() > 0;
    if (needs_segments && !layer.has_segments) return not_understood("rotary", "", "a format");
  }
  if (!layer.has_segments) return format::check_head_dim(run.k.spec, geometry.k_head_dim);
  if (geometry.rotary_dim() == 0) return not_understood("rotary", run.rotary.facts->name, "none");
  if (run.rotary.has_scale() && run.rotary.scale_source == format::ScaleSource::kGiven) {
    return not_understood("rotary", "given", "scales that are not given");
  }
  return format::check_head_dim(run.rotary, geometry.rotary_dim());
}

// 2 heads K SIDE V SIDE[ rotary SIDE], ...
Result<LayerPlan> parse_layer(std::string_view text, const CacheGeometry& geometry) {
  LayerPlan plan;
  int num_heads = 0;
  while (!text.empty()) {
    std::string_view part = take_until(text, ", ");
    HeadRunPlan run;
    run.first_head = num_heads;
    KVX_ASSIGN_OR_RETURN(run.num_heads, number_of("heads", take_until(part, " heads K ")));
    KVX_ASSIGN_OR_RETURN(const ParsedSide k, parse_side(take_until(part, " V ")));
    KVX_ASSIGN_OR_RETURN(const ParsedSide v, parse_side(take_until(part, " rotary ")));
    const bool has_segments = !part.empty();
    if (!plan.runs.empty() && has_segments != plan.has_segments) {
      return not_understood("rotary", part, "the same in all runs of heads");
    }
    plan.has_segments = has_segments;
    run.rotary = k.recipe.spec;
    if (plan.has_segments) {
      KVX_ASSIGN_OR_RETURN(const ParsedSide rotary, parse_side(part));
      run.rotary = rotary.recipe.spec;
    }
    if (run.num_heads < 1 || run.num_heads > geometry.num_kv_heads - num_heads) {
      return not_understood("heads", std::to_string(run.num_heads), "num_kv_heads in all");
    }
    run.k = k.recipe;
    run.v = v.recipe;
    plan.k_hadamard = k.hadamard;  // the layer's, and so every run's
    plan.v_hadamard = v.hadamard;
    KVX_RETURN_IF_ERROR(check_row(run, plan, geometry));
    if (geometry.v_head_dim > 0) {
      KVX_RETURN_IF_ERROR(format::check_head_dim(v.recipe.spec, geometry.v_head_dim));
    }
    plan.runs.push_back(run);
    num_heads += run.num_heads;
  }
  if (num_heads == geometry.num_kv_heads) return plan;
  return not_understood("heads", std::to_string(num_heads), "num_kv_heads in all");
}

// Until there are num_layers, like the one before or the last.
Status repeat_layer(int num_layers, StoredCache& stored) {
  // A short text could ask for more memory than there is: this is a thousand layers of a thousand.
  constexpr size_t kMostRuns = 1 << 20;
  CacheGeometry& geometry = stored.geometry;
  const auto num_more = static_cast<size_t>(num_layers) - stored.layers.size();
  if (num_more > 0 && num_more > kMostRuns / stored.layers.back().runs.size()) {
    return invalid_argument("the fingerprint has {} layers of {} runs of heads; expected {} in all",
                            num_layers, stored.layers.back().runs.size(), kMostRuns);
  }
  stored.layers.resize(num_layers, LayerPlan(stored.layers.back()));
  geometry.layer_windows.resize(num_layers, geometry.layer_windows.back());
  geometry.layer_sinks.resize(num_layers, geometry.layer_sinks.back());
  return {};
}

// layers_from_0 window W[ sinks S], RUNS; the next one begins where it ends.
Status take_layers(std::string_view& text, StoredCache& stored) {
  CacheGeometry& geometry = stored.geometry;
  constexpr std::string_view kName = "layers_from_";
  while (text.starts_with(kName)) {
    text.remove_prefix(kName.size());
    KVX_ASSIGN_OR_RETURN(const int first, number_of("layer", take_until(text, " ")));
    std::string_view value = take_until(text, "\n");
    if (take_until(value, " ") != "window") return not_understood("layer", value, "window");
    std::string_view seen = take_until(value, ", ");
    KVX_ASSIGN_OR_RETURN(const int window, number_of("window", take_until(seen, " sinks ")));
    int sinks = 0;
    if (!seen.empty()) {
      KVX_ASSIGN_OR_RETURN(sinks, number_of("sinks", seen));
    }
    const auto num_before = static_cast<int>(stored.layers.size());
    const bool is_next = num_before == 0 ? first == 0 : first >= num_before;
    if (!is_next || first >= geometry.num_layers) {
      return not_understood("layer", std::to_string(first), "the next one");
    }
    KVX_ASSIGN_OR_RETURN(LayerPlan plan, parse_layer(value, geometry));
    // Layers like the one before have no line of their own.
    if (first > 0) KVX_RETURN_IF_ERROR(repeat_layer(first, stored));
    stored.layers.push_back(std::move(plan));
    geometry.layer_windows.push_back(window);
    geometry.layer_sinks.push_back(sinks);
  }
  if (stored.layers.empty()) return not_understood("next fact", text, kName);
  return repeat_layer(geometry.num_layers, stored);
}

}  // namespace

Result<StoredCache> parse_fingerprint(std::string_view text) {
  StoredCache stored;
  KVX_ASSIGN_OR_RETURN(const std::string_view order, take_fact(text, "order"));
  using cache::BlockOrder;
  if (order == block_order_name(BlockOrder::kTurbomind)) {
    stored.order = BlockOrder::kTurbomind;
  } else if (order != block_order_name(BlockOrder::kHeads)) {
    return not_understood("order", order, block_order_name(BlockOrder::kHeads));
  }
  KVX_ASSIGN_OR_RETURN(stored.block_size, take_number(text, "block_size"));
  CacheGeometry& geometry = stored.geometry;
  KVX_ASSIGN_OR_RETURN(geometry.num_layers, take_number(text, "num_layers"));
  KVX_ASSIGN_OR_RETURN(geometry.num_kv_heads, take_number(text, "num_kv_heads"));
  KVX_ASSIGN_OR_RETURN(geometry.k_head_dim, take_number(text, "k_head_dim"));
  KVX_ASSIGN_OR_RETURN(geometry.v_head_dim, take_number(text, "v_head_dim"));
  if (text.starts_with("latent ")) {
    KVX_ASSIGN_OR_RETURN(const int latent, take_number(text, "latent"));
    if (latent != 1) return not_understood("latent", std::to_string(latent), "1");
    geometry.is_latent = true;
  }
  KVX_RETURN_IF_ERROR(check_geometry(geometry));
  KVX_ASSIGN_OR_RETURN(stored.full_precision_window.sink_blocks, take_number(text, "head_blocks"));
  KVX_ASSIGN_OR_RETURN(stored.full_precision_window.recent_blocks,
                       take_number(text, "recent_blocks"));
  const cache::FullPrecisionWindow& in_full = stored.full_precision_window;
  if (in_full.sink_blocks < 0 || in_full.recent_blocks < 0 ||
      (in_full.sink_blocks > 0 && !in_full.is_on())) {
    return invalid_argument(
        "the fingerprint's full-precision window has {} and {} blocks; expected counts",
        in_full.sink_blocks, in_full.recent_blocks);
  }
  KVX_ASSIGN_OR_RETURN(const std::string_view full_precision, take_fact(text, "wide"));
  KVX_ASSIGN_OR_RETURN(stored.full_precision_spec, format::make_spec(format::FormatId::kBF16));
  if (in_full.is_on()) {
    const auto id = format::format_named(full_precision);
    if (!id) return not_understood("wide", full_precision, "one of this library's formats");
    KVX_ASSIGN_OR_RETURN(stored.full_precision_spec, format::make_spec(*id));
    if (stored.full_precision_spec.has_scale())
      return not_understood("wide", full_precision, "bf16, f16 or f32");
  }
  KVX_RETURN_IF_ERROR(take_layers(text, stored));
  KVX_RETURN_IF_ERROR(check_geometry(geometry));
  KVX_ASSIGN_OR_RETURN(stored.calibration, take_fact(text, "calibration"));
  constexpr std::string_view kModel = "model ";
  if (!text.starts_with(kModel) || !text.ends_with('\n')) {
    return not_understood("last fact", text, "model");
  }
  text.remove_prefix(kModel.size());
  text.remove_suffix(1);
  stored.model = text;
  return stored;
}

}  // namespace kvx::kv
