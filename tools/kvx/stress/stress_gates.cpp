// Each figure at its worst: the length with the fewest right answers, the part that drifts most.
#include "tools/kvx/stress/stress_gates.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace kvx::tool {
namespace {

using quality::Figure;
using quality::Gate;
using quality::RetrievalTask;

// A figure and the place where it is worst, "" of a figure that has none.
struct WorstPlace {
  double value = std::numeric_limits<double>::quiet_NaN();
  std::string place = "";

  // A figure that is no number fails every gate, so it stays.
  void take(double found, bool is_worse, const std::string& at) {
    if (!place.empty() && (std::isnan(value) || (!std::isnan(found) && !is_worse))) return;
    value = found;
    place = at;
  }
};

WorstPlace fewest_answers(const StressReport& report, size_t cache, RetrievalTask task) {
  WorstPlace worst;
  for (const RetrievalReport& one : report.retrieval) {
    if (one.task != task) continue;
    const double found = one.scores[cache].exact_percent.value;
    worst.take(found, found < worst.value, fmt::format(" at {} tokens", one.length));
  }
  return worst;
}

WorstPlace most_nll_change(const StressReport& report, size_t cache) {
  WorstPlace worst;
  for (const RetrievalReport& one : report.retrieval) {
    const double found = one.scores[cache].nll_change.value;
    worst.take(found, found > worst.value,
               fmt::format(" in {} at {} tokens", name_of(one.task), one.length));
  }
  return worst;
}

WorstPlace most_drift(const StressReport& report, size_t cache) {
  WorstPlace worst;
  for (const DriftPart& part : report.drift) {
    const double found = part.kl[cache].value;
    worst.take(found, found > worst.value,
               fmt::format(" from token {} to {}", part.first_token,
                           part.first_token + part.num_tokens - 1));
  }
  return worst;
}

double saturated_inputs(const StressCache& cache) {
  int64_t sum = 0;
  for (const kv::LayerCounts& layer : cache.saturation) {
    for (const auto& head : layer.k) sum += head.saturated;
    for (const auto& head : layer.v) sum += head.saturated;
  }
  return static_cast<double>(sum);
}

WorstPlace figure_of(const StressReport& report, size_t cache, Figure figure) {
  switch (figure) {
    case Figure::kPasskey:
      return fewest_answers(report, cache, RetrievalTask::kPasskey);
    case Figure::kNeedles:
      return fewest_answers(report, cache, RetrievalTask::kNeedles);
    case Figure::kEntities:
      return fewest_answers(report, cache, RetrievalTask::kEntities);
    case Figure::kAnswerNll:
      return most_nll_change(report, cache);
    case Figure::kDrift:
      return most_drift(report, cache);
    case Figure::kSaturated:
      return {saturated_inputs(report.caches[cache])};
    case Figure::kNonfinite:
      return {static_cast<double>(report.caches[cache].nonfinite_inputs)};
    case Figure::kPerplexityChange:
    case Figure::kKl:
    case Figure::kSameTop:
    case Figure::kOutputCosine:
    case Figure::kOutputError:
    case Figure::kLogitCosine:
    case Figure::kLogitError:
      break;  // of kvx compare
  }
  return {};
}

}  // namespace

std::vector<std::string> failures_of(const StressReport& report, const std::vector<Gate>& gates) {
  std::vector<std::string> failures;
  for (size_t cache = 1; cache < report.caches.size(); ++cache) {
    for (const Gate& gate : gates) {
      const WorstPlace worst = figure_of(report, cache, gate.figure);
      if (!gate.fails(worst.value)) continue;
      failures.push_back(fmt::format("{}: {} is {:.6g}{}{}, which --fail-if {} does not allow",
                                     report.caches[cache].name, name_of(gate.figure), worst.value,
                                     gate.is_percent() ? " %" : "", worst.place, gate.text));
    }
  }
  return failures;
}

}  // namespace kvx::tool
