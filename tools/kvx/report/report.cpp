// The report as a table and as JSON.
#include "tools/kvx/report/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "tools/kvx/bench/timing.hpp"
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

Json json_of(const CacheReport& cache) {
  Json layers = Json::array();
  for (const LayerError& layer : cache.layers) {
    layers.push_back(
        {{"cosine_similarity", layer.cosine_similarity}, {"relative_error", layer.relative_error}});
  }
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
          {"prefill_tokens_per_second", json_of(cache.prefill)},
          {"decode_tokens_per_second", json_of(cache.decode)},
          {"nonfinite_inputs", cache.nonfinite_inputs}};
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

std::vector<std::string> row_of(const CacheReport& cache) {
  const LayerError& worst = worst_layer(cache);
  return {cache.name,
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
}

}  // namespace

const LayerError& worst_layer(const CacheReport& cache) {
  return *std::max_element(
      cache.layers.begin(), cache.layers.end(),
      [](const LayerError& a, const LayerError& b) { return a.relative_error < b.relative_error; });
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
  Table table({{"cache"},
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
               {"decode t/s", Align::kRight}});
  for (const CacheReport& cache : report.caches) table.add_row(row_of(cache));
  std::string text = headline(report) + "\n\n" + table.text(color);
  text += fmt::format(
      "\n{} x {} tokens, {} tokens scored; {} products, {} threads, {}.\n"
      "change, KL (nats), top-1: against {}. cosine, rel. error: of the attention output, worst "
      "layer.\n"
      "t/s: tokens a second, the median and the extremes of repeats that took turns ({}).\n",
      report.num_windows, report.context, report.num_scored_tokens, report.products, report.threads,
      report.cpu_level, report.caches.front().name, repeats_text(report.caches.front()));
  if (!report.overrides.empty()) text += fmt::format("exceptions: {}\n", report.overrides);
  for (const CacheReport& cache : report.caches) {
    if (cache.nonfinite_inputs == 0) continue;
    text += fmt::format("{}: {} inputs were not finite and could not be stored as such\n",
                        cache.name, cache.nonfinite_inputs);
  }
  return text;
}

std::string report_json(const CompareReport& report) {
  Json caches = Json::array();
  for (const CacheReport& cache : report.caches) caches.push_back(json_of(cache));
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
                     {"caches", caches}};
  // A file name may hold bytes that are no UTF-8: they are replaced, not thrown about.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace kvx::tool
