// The stress report as tables, as JSON and as a page.
#include "tools/kvx/stress/stress_report.hpp"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tools/kvx/embedded.hpp"
#include "tools/kvx/report/page.hpp"
#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

using Json = nlohmann::ordered_json;
using quality::Estimate;

Json json_of(const Estimate& estimate) {
  return {{"value", estimate.value}, {"standard_error", estimate.standard_error}};
}

std::string text_of(const Estimate& estimate, int digits, bool with_sign = false) {
  const std::string value = with_sign ? fmt::format("{:+.{}f}", estimate.value, digits)
                                      : fmt::format("{:.{}f}", estimate.value, digits);
  if (!std::isfinite(estimate.standard_error)) return value;
  return fmt::format("{} +- {:.{}f}", value, estimate.standard_error, digits);
}

// What saturates in a cache: of how many heads, and the head with the most.
struct SaturationSummary {
  int64_t num_inputs = 0;
  int num_heads = 0;
  int num_saturated_heads = 0;
  int worst_layer = -1;
  int worst_head = -1;
};

SaturationSummary summary_of(const std::vector<kv::LayerCounts>& layers) {
  SaturationSummary summary;
  int64_t most = 0;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (size_t head = 0; head < layers[layer].k.size(); ++head) {
      const int64_t count = layers[layer].k[head].saturated + layers[layer].v[head].saturated;
      summary.num_inputs += count;
      ++summary.num_heads;
      if (count > 0) ++summary.num_saturated_heads;
      if (count <= most) continue;
      most = count;
      summary.worst_layer = static_cast<int>(layer);
      summary.worst_head = static_cast<int>(head);
    }
  }
  return summary;
}

std::string saturation_text(const StressCache& cache) {
  const SaturationSummary found = summary_of(cache.saturation);
  if (found.num_inputs == 0) return "none";
  return fmt::format("{} inputs in {} of {} heads, most in {}:{}", found.num_inputs,
                     found.num_saturated_heads, found.num_heads, found.worst_layer,
                     found.worst_head);
}

Json json_of(const StressCache& cache) {
  const SaturationSummary found = summary_of(cache.saturation);
  const Json saturation = {
      {"inputs", found.num_inputs},
      {"heads", found.num_saturated_heads},
      {"of_heads", found.num_heads},
      {"worst_layer", found.worst_layer < 0 ? Json(nullptr) : Json(found.worst_layer)},
      {"worst_kv_head", found.worst_head < 0 ? Json(nullptr) : Json(found.worst_head)}};
  return {{"name", cache.name},
          {"bits_per_value", cache.bits_per_value},
          {"nonfinite_inputs", cache.nonfinite_inputs},
          {"saturation", saturation}};
}

Json json_of(const RetrievalReport& report) {
  Json scores = Json::array();
  for (const RetrievalScore& score : report.scores) {
    scores.push_back({{"exact_percent", json_of(score.exact_percent)},
                      {"nll", json_of(score.nll)},
                      {"nll_change", json_of(score.nll_change)}});
  }
  return {{"task", name_of(report.task)},
          {"length", report.length},
          {"num_questions", report.num_questions},
          {"scores", scores}};
}

Json json_of(const DriftPart& part) {
  Json kl = Json::array();
  Json same_top = Json::array();
  for (const Estimate& one : part.kl) kl.push_back(json_of(one));
  for (const Estimate& one : part.same_top) same_top.push_back(json_of(one));
  return {{"first_token", part.first_token},
          {"num_tokens", part.num_tokens},
          {"kl", kl},
          {"same_top_percent", same_top}};
}

std::string retrieval_table(const StressReport& report, bool color) {
  Table table({{"task"},
               {"tokens", Align::kRight},
               {"questions", Align::kRight},
               {"cache"},
               {"exact %", Align::kRight},
               {"nll", Align::kRight},
               {"nll change", Align::kRight}});
  for (const RetrievalReport& one : report.retrieval) {
    for (size_t c = 0; c < one.scores.size(); ++c) {
      const RetrievalScore& score = one.scores[c];
      table.add_row({c == 0 ? std::string(name_of(one.task)) : "",
                     c == 0 ? fmt::format("{}", one.length) : "",
                     c == 0 ? fmt::format("{}", one.num_questions) : "", report.caches[c].name,
                     text_of(score.exact_percent, 1), text_of(score.nll, 3),
                     c == 0 ? "" : text_of(score.nll_change, 4, true)});
    }
  }
  return table.text(color);
}

std::string drift_table(const StressReport& report, bool color) {
  std::vector<Table::Column> columns = {{"written tokens"}};
  for (size_t c = 1; c < report.caches.size(); ++c) {
    columns.push_back({report.caches[c].name, Align::kRight});
  }
  Table table(std::move(columns));
  for (const DriftPart& part : report.drift) {
    std::vector<std::string> row = {
        fmt::format("{} to {}", part.first_token, part.first_token + part.num_tokens - 1)};
    for (size_t c = 1; c < part.kl.size(); ++c) row.push_back(text_of(part.kl[c], 5));
    table.add_row(std::move(row));
  }
  return table.text(color);
}

}  // namespace

std::string stress_table(const StressReport& report, bool color) {
  std::string text = retrieval_table(report, color);
  text += fmt::format(
      "\nexact: questions whose whole answer comes first. nll: of the answers' tokens, nats a "
      "token;\nchange: against {}, paired. {} texts each, seed {}; {} products, {} threads, {}.\n",
      report.caches.front().name, report.num_samples, report.seed, report.products, report.threads,
      report.cpu_level);
  if (!report.drift.empty() && report.caches.size() > 1) {
    text += fmt::format("\n{}", drift_table(report, color));
    text += fmt::format("\nKL divergence from {}, nats a token, on a text that it wrote.\n",
                        report.caches.front().name);
  }
  text += "\n";
  for (const StressCache& cache : report.caches) {
    text += fmt::format("clipped by a static scale, {}: {}\n", cache.name, saturation_text(cache));
    if (cache.nonfinite_inputs == 0) continue;
    text += fmt::format("{}: {} inputs were not finite and could not be stored as such\n",
                        cache.name, cache.nonfinite_inputs);
  }
  return text;
}

std::string stress_json(const StressReport& report) {
  Json caches = Json::array();
  Json retrieval = Json::array();
  Json drift = Json::array();
  for (const StressCache& cache : report.caches) caches.push_back(json_of(cache));
  for (const RetrievalReport& one : report.retrieval) retrieval.push_back(json_of(one));
  for (const DriftPart& part : report.drift) drift.push_back(json_of(part));
  const Json json = {{"version", report.version},
                     {"model", report.model},
                     {"cpu_level", report.cpu_level},
                     {"products", report.products},
                     {"threads", report.threads},
                     {"seed", report.seed},
                     {"num_samples", report.num_samples},
                     {"caches", caches},
                     {"retrieval", retrieval},
                     {"drift", drift}};
  return json_text(json);
}

std::string stress_html(const StressReport& report) {
  return page_with_data(stress_page(), stress_json(report));
}

}  // namespace kvx::tool
