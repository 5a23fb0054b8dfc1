// The tables that kvx tune prints.
#include "tools/kvx/tune/report.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

using Json = nlohmann::ordered_json;
using quality::Estimate;

std::string change_text(const Estimate& change) {
  return std::isfinite(change.standard_error)
             ? fmt::format("{:+.2f} +- {:.2f}", change.value, change.standard_error)
             : fmt::format("{:+.2f}", change.value);
}

Json json_of(const Estimate& estimate) {
  return {{"value", estimate.value}, {"standard_error", estimate.standard_error}};
}

std::string tried_table(const std::vector<TriedOption>& tried, bool color) {
  Table table(
      {{"option"}, {"KL", Align::kRight}, {"perplexity change %", Align::kRight}, {"kept"}});
  for (const TriedOption& option : tried) {
    const bool is_first = &option == &tried.front();
    table.add_row({option.name, fmt::format("{:.5f}", option.kl.value),
                   change_text(option.change_percent),
                   is_first         ? "-"
                   : option.is_kept ? "yes"
                                    : "no"});
  }
  return table.text(color);
}

std::string judged_table(const std::vector<TunedQuality>& judged, bool color) {
  Table table({{"cache"},
               {"bits", Align::kRight},
               {"bytes/token", Align::kRight},
               {"KL", Align::kRight},
               {"perplexity change %", Align::kRight},
               {"top-1 %", Align::kRight}});
  for (const TunedQuality& cache : judged) {
    table.add_row({cache.name, fmt::format("{:.2f}", cache.bits_per_value),
                   fmt::format("{:.0f}", cache.bytes_per_token),
                   fmt::format("{:.5f}", cache.quality.kl().value),
                   change_text(cache.quality.change_percent()),
                   fmt::format("{:.2f}", cache.quality.same_top_percent().value)});
  }
  return table.text(color);
}

// A bar as long as the bits: what a layer was given is seen at a glance.
std::string bar(double bits) {
  return std::string(static_cast<size_t>(std::lround(bits)), '#');
}

std::string layer_table(const Assignment& layers, int num_layers, bool color) {
  Table table({{"layer", Align::kRight},
               {"K"},
               {"V"},
               {"bits", Align::kRight},
               {"K error x1000", Align::kRight},
               {"V error x1000", Align::kRight},
               {""}});
  for (int i = 0; i < num_layers; ++i) {
    const LayerFormats formats = layers.formats(i);
    table.add_row({fmt::format("{}", i), formats.k, formats.v,
                   fmt::format("{:.2f}", layers.bits(i)),
                   fmt::format("{:.3f}", 1000 * layers.error(i, true)),
                   fmt::format("{:.3f}", 1000 * layers.error(i, false)), bar(layers.bits(i))});
  }
  return table.text(color);
}

}  // namespace

std::string TuneReport::text(bool color) const {
  std::string text =
      fmt::format("collected from {} tokens in {} prompts\n\n", num_prompt_tokens, num_prompts);
  text += tried_table(tried, color);
  if (layers) text += fmt::format("\n{}", layer_table(*layers, num_layers, color));
  text += fmt::format("\non text that chose nothing:\n{}", judged_table(judged, color));
  text += fmt::format("\nrecipe: {}\n", recipe);
  for (const std::string& one : overrides) text += fmt::format("layers: {}\n", one);
  text += fmt::format("took {}\n", duration_text(seconds));
  return text;
}

std::string TuneReport::json() const {
  Json options = Json::array();
  for (const TriedOption& option : tried) {
    options.push_back({{"option", option.name},
                       {"kl", json_of(option.kl)},
                       {"change_percent", json_of(option.change_percent)},
                       {"kept", option.is_kept}});
  }
  Json caches = Json::array();
  for (const TunedQuality& cache : judged) {
    caches.push_back({{"cache", cache.name},
                      {"bits_per_value", cache.bits_per_value},
                      {"bytes_per_token", cache.bytes_per_token},
                      {"kl", json_of(cache.quality.kl())},
                      {"change_percent", json_of(cache.quality.change_percent())},
                      {"same_top_percent", json_of(cache.quality.same_top_percent())}});
  }
  Json plan = Json::array();
  for (int i = 0; layers && i < num_layers; ++i) {
    const LayerFormats formats = layers->formats(i);
    plan.push_back({{"k", formats.k},
                    {"v", formats.v},
                    {"bits", layers->bits(i)},
                    {"k_error", layers->error(i, true)},
                    {"v_error", layers->error(i, false)}});
  }
  return Json({{"prompts", num_prompts},
               {"prompt_tokens", num_prompt_tokens},
               {"options", options},
               {"layers", plan},
               {"judged", caches}})
      .dump();
}

std::optional<std::string> TuneReport::failure(const Goal& goal) const {
  const TunedQuality& result = judged.back();
  if (goal.kind == Goal::Kind::kBits && result.bits_per_value > goal.limit + 1e-9) {
    return fmt::format("bits is {}; the cheapest cache has {:.3f}", goal.limit,
                       result.bits_per_value);
  }
  if (goal.is_kept(result.quality)) return std::nullopt;
  return fmt::format("budget is {}; the best cache, {:.2f} bits, measures {:.5g}", goal.text(),
                     result.bits_per_value, goal.measure(result.quality));
}

}  // namespace kvx::tool
