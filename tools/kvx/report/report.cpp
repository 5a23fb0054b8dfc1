// The report as a table and as JSON.
#include "tools/kvx/report/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "tools/kvx/bench/timing.hpp"
#include "tools/kvx/report/page.hpp"
#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

using Json = nlohmann::ordered_json;
using quality::Estimate;

Json json_of(const Estimate& estimate) {
  return {{"value", estimate.value}, {"standard_error", estimate.standard_error}};
}

Json json_of(const std::optional<Speed>& speed) {
  if (!speed) return nullptr;
  return {{"median", speed->median},
          {"lowest", speed->lowest},
          {"highest", speed->highest},
          {"num_repeats", speed->num_repeats}};
}

Json json_of(const LayerError& error) {
  return {{"cosine_similarity", error.cosine_similarity}, {"relative_error", error.relative_error}};
}

// [layers][num_kv_heads]; null where nothing was measured.
Json json_of_heads(const std::vector<LayerError>& heads, int num_kv_heads) {
  if (heads.empty()) return nullptr;
  Json layers = Json::array();
  for (size_t i = 0; i < heads.size(); ++i) {
    if (i % num_kv_heads == 0) layers.push_back(Json::array());
    layers.back().push_back(json_of(heads[i]));
  }
  return layers;
}

// [layers], {"k": [num_kv_heads], "v": [num_kv_heads]}.
Json json_of(const std::vector<kv::LayerCounts>& saturation) {
  Json layers = Json::array();
  const auto side = [](const std::vector<ops::HeadCounts>& heads) {
    Json counts = Json::array();
    for (const ops::HeadCounts& head : heads) counts.push_back(head.saturated);
    return counts;
  };
  for (const kv::LayerCounts& layer : saturation) {
    layers.push_back({{"k", side(layer.k)}, {"v", side(layer.v)}});
  }
  return layers;
}

Json json_of(const GateFailure& failure) {
  const auto index = [](int number) { return number < 0 ? Json(nullptr) : Json(number); };
  return {{"cache", failure.cache},
          {"gate", failure.gate.text},
          {"figure", name_of(failure.gate.figure)},
          {"value", failure.value},
          {"limit", failure.gate.limit},
          {"layer", index(failure.layer)},
          {"kv_head", index(failure.kv_head)},
          {"text", failure.text()}};
}

Json json_of(const CacheReport& cache) {
  Json layers = Json::array();
  for (const LayerError& layer : cache.layers) layers.push_back(json_of(layer));
  Json windows = Json::array();
  for (const WindowReport& window : cache.windows) {
    windows.push_back({{"perplexity", window.perplexity}, {"kl", window.kl}});
  }
  return {{"name", cache.name},
          {"bits_per_value", cache.bits_per_value},
          {"bytes_per_token", cache.bytes_per_token},
          {"tokens_per_gib", cache.tokens_per_gib},
          {"perplexity", json_of(cache.perplexity)},
          {"change_percent", json_of(cache.change_percent)},
          {"kl", json_of(cache.kl)},
          {"same_top_percent", json_of(cache.same_top_percent)},
          {"windows", windows},
          {"attention_by_layer", layers},
          {"attention_by_head", json_of_heads(cache.heads, cache.num_kv_heads)},
          {"logits_by_head", json_of_heads(cache.logit_heads, cache.num_kv_heads)},
          {"prefill_tokens_per_second", json_of(cache.prefill)},
          {"decode_tokens_per_second", json_of(cache.decode)},
          {"nonfinite_inputs", cache.nonfinite_inputs},
          {"saturated_inputs", saturated_inputs(cache)},
          {"saturated_by_head", json_of(cache.saturation)}};
}

// "12.03 +- 0.37"; only the number where the error is unknown.
std::string text_of(const Estimate& estimate, int digits, bool with_sign = false) {
  const std::string value = with_sign ? fmt::format("{:+.{}f}", estimate.value, digits)
                                      : fmt::format("{:.{}f}", estimate.value, digits);
  if (!std::isfinite(estimate.standard_error)) return value;
  return fmt::format("{} +- {:.{}f}", value, estimate.standard_error, digits);
}

// "512 (498-530)": the median and the extremes.
std::string text_of(const std::optional<Speed>& speed, int digits) {
  if (!speed) return "-";
  return fmt::format("{:.{}f} ({:.{}f}-{:.{}f})", speed->median, digits, speed->lowest, digits,
                     speed->highest, digits);
}

std::string repeats_text(const CacheReport& cache) {
  const auto text = [](const char* name, const std::optional<Speed>& speed) {
    return speed ? fmt::format("{} of {}", name, speed->num_repeats)
                 : fmt::format("{} had too few", name);
  };
  return text("prefill", cache.prefill) + ", " + text("decode", cache.decode);
}

// The worst of some figures and its index; a figure that is no number is worse than any.
struct Worst {
  double value = 0;
  int index = -1;
};

template <class Get>
Worst worst_of(const std::vector<LayerError>& errors, const Get& get) {
  Worst worst;
  for (size_t i = 0; i < errors.size(); ++i) {
    const double value = get(errors[i]);
    const bool is_worse = !(value <= worst.value) && !std::isnan(worst.value);
    if (worst.index < 0 || is_worse) worst = {value, static_cast<int>(i)};
  }
  return worst;
}

Worst worst_error(const std::vector<LayerError>& errors) {
  return worst_of(errors, [](const LayerError& e) { return e.relative_error; });
}

Worst worst_cosine(const std::vector<LayerError>& errors) {
  Worst worst = worst_of(errors, [](const LayerError& e) { return -e.cosine_similarity; });
  worst.value = -worst.value;
  return worst;
}

// "3:1": layer and KV head, as --heads takes them.
std::string place_of(int index, int num_kv_heads) {
  return index < 0 ? "-" : fmt::format("{}:{}", index / num_kv_heads, index % num_kv_heads);
}

// The head with the most saturated inputs, K and V together; the value is the sum of all heads.
Worst most_saturated(const CacheReport& cache) {
  Worst most;
  int64_t highest = 0;
  const std::vector<kv::LayerCounts>& layers = cache.saturation;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (size_t head = 0; head < layers[layer].k.size(); ++head) {
      const int64_t count = layers[layer].k[head].saturated + layers[layer].v[head].saturated;
      most.value += static_cast<double>(count);
      if (count <= highest) continue;
      highest = count;
      most.index = static_cast<int>(layer * layers[layer].k.size() + head);
    }
  }
  return most;
}

Worst figure_of(const CacheReport& cache, quality::Figure figure) {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  using quality::Figure;
  switch (figure) {
    case Figure::kPerplexityChange:
      return {cache.change_percent.value};
    case Figure::kKl:
      return {cache.kl.value};
    case Figure::kSameTop:
      return {cache.same_top_percent.value};
    case Figure::kOutputCosine:
      return worst_cosine(cache.heads);
    case Figure::kOutputError:
      return worst_error(cache.heads);
    case Figure::kLogitCosine:
      return cache.logit_heads.empty() ? Worst{kUnknown} : worst_cosine(cache.logit_heads);
    case Figure::kLogitError:
      return cache.logit_heads.empty() ? Worst{kUnknown} : worst_error(cache.logit_heads);
    case Figure::kSaturated:
      return most_saturated(cache);
    case Figure::kNonfinite:
      return {static_cast<double>(cache.nonfinite_inputs)};
    case Figure::kPasskey:
    case Figure::kNeedles:
    case Figure::kEntities:
    case Figure::kAnswerNll:
    case Figure::kDrift:
      break;  // of kvx stress
  }
  return {kUnknown};
}

std::vector<std::string> row_of(const CacheReport& cache, bool has_logits) {
  const LayerError& worst = worst_layer(cache);
  std::vector<std::string> cells = {cache.name,
                                    fmt::format("{:.2f}", cache.bits_per_value),
                                    fmt::format("{:.0f}", cache.bytes_per_token),
                                    fmt::format("{}", cache.tokens_per_gib),
                                    text_of(cache.perplexity, 3),
                                    text_of(cache.change_percent, 2, true),
                                    fmt::format("{:.5f}", cache.kl.value),
                                    fmt::format("{:.2f}", cache.same_top_percent.value),
                                    fmt::format("{:.5f}", worst.cosine_similarity),
                                    fmt::format("{:.4f}", worst.relative_error),
                                    text_of(cache.prefill, 0),
                                    text_of(cache.decode, 1)};
  if (has_logits) {
    const Worst cosine = worst_cosine(cache.logit_heads);
    const Worst error = worst_error(cache.logit_heads);
    cells.push_back(fmt::format("{:.5f}", cosine.value));
    cells.push_back(fmt::format("{:.4f}", error.value));
    cells.push_back(place_of(error.index, cache.num_kv_heads));
  }
  return cells;
}

}  // namespace

const LayerError& worst_layer(const CacheReport& cache) {
  return *std::max_element(
      cache.layers.begin(), cache.layers.end(),
      [](const LayerError& a, const LayerError& b) { return a.relative_error < b.relative_error; });
}

int64_t saturated_inputs(const CacheReport& cache) {
  return static_cast<int64_t>(most_saturated(cache).value);
}

std::string GateFailure::text() const {
  const std::string place =
      layer < 0 ? "" : fmt::format(" in layer {}, KV head {}", layer, kv_head);
  const std::string sum = gate.figure == quality::Figure::kSaturated && layer >= 0
                              ? fmt::format(", most{}", place)
                              : place;
  return fmt::format("{}: {} is {:.6g}{}{}, which --fail-if {} does not allow", cache,
                     name_of(gate.figure), value, gate.is_percent() ? " %" : "", sum, gate.text);
}

std::vector<GateFailure> failures_of(const CompareReport& report) {
  std::vector<GateFailure> failures;
  for (const CacheReport& cache : std::span(report.caches).subspan(1)) {
    for (const quality::Gate& gate : report.gates) {
      const Worst found = figure_of(cache, gate.figure);
      if (!gate.fails(found.value)) continue;
      GateFailure failure{cache.name, gate, found.value};
      if (found.index >= 0) {
        failure.layer = found.index / cache.num_kv_heads;
        failure.kv_head = found.index % cache.num_kv_heads;
      }
      failures.push_back(std::move(failure));
    }
  }
  return failures;
}

std::optional<Speed> speed_of(std::vector<double> tokens_per_second) {
  constexpr size_t kFewestRepeats = 3;
  if (tokens_per_second.size() < kFewestRepeats) return std::nullopt;
  const auto [lowest, highest] =
      std::minmax_element(tokens_per_second.begin(), tokens_per_second.end());
  Speed speed;
  speed.lowest = *lowest;
  speed.highest = *highest;
  speed.num_repeats = static_cast<int>(tokens_per_second.size());
  speed.median = median(std::move(tokens_per_second));
  return speed;
}

std::string headline(const CompareReport& report) {
  const CacheReport& base = report.caches.front();
  const CacheReport* best = nullptr;
  const CacheReport* nearest = nullptr;
  for (const CacheReport& cache : std::span(report.caches).subspan(1)) {
    const double change = cache.change_percent.value;
    if (!std::isfinite(change)) continue;
    if (nearest == nullptr || change < nearest->change_percent.value) nearest = &cache;
    const bool is_smaller = best == nullptr || cache.bytes_per_token < best->bytes_per_token;
    if (change < kGoodChangePercent && is_smaller) best = &cache;
  }
  if (nearest == nullptr) return fmt::format("No cache was compared with {}.", base.name);
  const CacheReport& shown = best != nullptr ? *best : *nearest;
  const std::string change = text_of(shown.change_percent, 2, true);
  if (best == nullptr) {
    return fmt::format(
        "No cache here keeps the perplexity within {:.0f} % of {}: {} is the nearest with {} %.",
        kGoodChangePercent, base.name, shown.name, change);
  }
  return fmt::format(
      "{} is the smallest cache here that keeps the perplexity within {:.0f} % of {}: a token "
      "takes "
      "{:.0f} bytes instead of {:.0f}, {:.1f} times fewer, and perplexity changes by {} %.",
      shown.name, kGoodChangePercent, base.name, shown.bytes_per_token, base.bytes_per_token,
      base.bytes_per_token / shown.bytes_per_token, change);
}

std::string report_table(const CompareReport& report, bool color) {
  const bool has_logits = !report.caches.front().logit_heads.empty();
  std::vector<Table::Column> columns = {{"cache"},
                                        {"bits", Align::kRight},
                                        {"bytes/token", Align::kRight},
                                        {"tokens/GiB", Align::kRight},
                                        {"perplexity", Align::kRight},
                                        {"change %", Align::kRight},
                                        {"KL", Align::kRight},
                                        {"top-1 %", Align::kRight},
                                        {"cosine", Align::kRight},
                                        {"rel. error", Align::kRight},
                                        {"prefill t/s", Align::kRight},
                                        {"decode t/s", Align::kRight}};
  if (has_logits) {
    columns.push_back({"logit cosine", Align::kRight});
    columns.push_back({"logit error", Align::kRight});
    columns.push_back({"at", Align::kRight});
  }
  Table table(std::move(columns));
  for (const CacheReport& cache : report.caches) table.add_row(row_of(cache, has_logits));
  std::string text = headline(report) + "\n\n" + table.text(color);
  text += fmt::format(
      "\n{} x {} tokens, {} tokens scored; {} products, {} threads, {}.\n"
      "change, KL (nats), top-1: against {}. cosine, rel. error: of the attention output, worst "
      "layer.\n"
      "t/s: tokens a second, the median and the extremes of repeats that took turns ({}).\n",
      report.num_windows, report.context, report.num_scored_tokens, report.products, report.threads,
      report.cpu_level, report.caches.front().name, repeats_text(report.caches.front()));
  if (has_logits) {
    text += "logit cosine, error: of q k before the softmax, worst layer and KV head; at: where.\n";
  }
  if (!report.overrides.empty()) text += fmt::format("exceptions: {}\n", report.overrides);
  for (const CacheReport& cache : report.caches) {
    if (cache.nonfinite_inputs == 0) continue;
    text += fmt::format("{}: {} inputs were not finite and could not be stored as such\n",
                        cache.name, cache.nonfinite_inputs);
  }
  for (const CacheReport& cache : report.caches) {
    if (saturated_inputs(cache) == 0) continue;
    const Worst most = most_saturated(cache);
    text += fmt::format("{}: {:.0f} inputs were clipped by a static scale, most in {}\n",
                        cache.name, most.value, place_of(most.index, cache.num_kv_heads));
  }
  return text;
}

std::string report_json(const CompareReport& report) {
  Json caches = Json::array();
  for (const CacheReport& cache : report.caches) caches.push_back(json_of(cache));
  Json gates = Json::array();
  for (const quality::Gate& gate : report.gates) gates.push_back(gate.text);
  Json failures = Json::array();
  for (const GateFailure& failure : failures_of(report)) failures.push_back(json_of(failure));
  const Json json = {{"version", report.version},
                     {"headline", headline(report)},
                     {"model", report.model},
                     {"text", report.text},
                     {"cpu_level", report.cpu_level},
                     {"products", report.products},
                     {"threads", report.threads},
                     {"context", report.context},
                     {"num_windows", report.num_windows},
                     {"num_scored_tokens", report.num_scored_tokens},
                     {"overrides", report.overrides},
                     {"fail_if", gates},
                     {"failures", failures},
                     {"caches", caches}};
  return json_text(json);
}

}  // namespace kvx::tool
