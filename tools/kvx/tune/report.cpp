// The tables that kvx tune prints.
#include "tools/kvx/tune/report.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tools/kvx/table.hpp"
#include "tools/kvx/tune/plan_text.hpp"

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

// Of a layer whose heads were widened one by one, "heads" has each one's.
Json json_of(const Assignment& plan, int layer) {
  const std::vector<KvFormats> formats = plan.formats(layer);
  Json parts = Json::array();
  for (int part = 0; part < plan.num_parts(); ++part) {
    parts.push_back({{"k", formats[part].k},
                     {"v", formats[part].v},
                     {"k_error", plan.error(CacheSide::kK, layer, part)},
                     {"v_error", plan.error(CacheSide::kV, layer, part)}});
  }
  Json json = plan.num_parts() == 1 ? parts.front() : Json({{"heads", parts}});
  json["bits"] = plan.bits(layer);
  return json;
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

}  // namespace

std::string TuneReport::text(bool color) const {
  std::string text =
      fmt::format("collected from {} tokens in {} prompts\n\n", num_prompt_tokens, num_prompts);
  text += tried_table(tried, color);
  if (plan) text += fmt::format("\n{}", plan_text(*plan, color));
  text += fmt::format("\non text that chose nothing:\n{}", judged_table(judged, color));
  text += fmt::format("\nrecipe: {}\n", recipe);
  for (const std::string& one : overrides.layers) text += fmt::format("layers: {}\n", one);
  for (const std::string& one : overrides.heads) text += fmt::format("heads: {}\n", one);
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
  Json layers = Json::array();
  for (int i = 0; plan && i < plan->num_layers(); ++i) layers.push_back(json_of(*plan, i));
  return Json({{"prompts", num_prompts},
               {"prompt_tokens", num_prompt_tokens},
               {"options", options},
               {"layers", layers},
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
