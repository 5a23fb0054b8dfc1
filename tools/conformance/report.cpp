// The report of a run.
#include "tools/conformance/report.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

namespace kvx::conformance {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kOutcomeNames[] = {"passed", "failed", "absent", "not run"};

std::string section_table(const Report& report) {
  std::string text = fmt::format("{:<28}{:>8}{:>8}{:>8}{:>9}\n", "section", "passed", "failed",
                                 "absent", "not run");
  for (int s = 0; s < static_cast<int>(Section::kNumSections); ++s) {
    const auto section = static_cast<Section>(s);
    std::array<int, 4> counts{};
    for (const Result& result : report.results) {
      if (result.check->section == section) ++counts[static_cast<size_t>(result.outcome)];
    }
    if (counts == std::array<int, 4>{}) continue;
    text += fmt::format("{:<28}{:>8}{:>8}{:>8}{:>9}\n", title_of(section), counts[0], counts[1],
                        counts[2], counts[3]);
  }
  return text;
}

std::string failures(const Report& report) {
  std::string text;
  for (const Result& result : report.results) {
    if (result.outcome != Outcome::kFailed) continue;
    text += fmt::format("\nFAILED {} / {}\n       {}\n", title_of(result.check->section),
                        result.check->name, result.reason);
  }
  return text;
}

// The features that are absent, each once.
std::string absences(const Report& report) {
  Features missing;
  for (const Result& result : report.results) missing.add(result.missing);
  const std::vector<std::string> names = missing.names();
  return names.empty() ? "" : fmt::format("\nabsent: {}\n", fmt::join(names, ", "));
}

}  // namespace

int Report::count(Outcome outcome) const {
  return static_cast<int>(std::count_if(results.begin(), results.end(), [&](const Result& result) {
    return result.outcome == outcome;
  }));
}

std::string Report::verdict() const {
  const int passed = count(Outcome::kPassed);
  const int failed = count(Outcome::kFailed);
  std::string text =
      conforms()
          ? fmt::format("CONFORMS ({} claims): all {} claimed checks pass", claims_from, passed)
          : fmt::format("DOES NOT CONFORM ({} claims): {} of {} claimed checks fail", claims_from,
                        failed, passed + failed);
  if (const int absent = count(Outcome::kAbsent)) {
    text += fmt::format("; {} of what is not claimed are absent", absent);
  }
  if (const int not_run = count(Outcome::kNotRun)) {
    text += fmt::format("; {} device checks not run, no GPU in this machine", not_run);
  }
  return text;
}

std::string text_of(const Report& report) {
  std::string text =
      report.library + "\n\n" + section_table(report) + failures(report) + absences(report);
  if (!report.unjudged.empty()) {
    text += fmt::format("\nclaimed, but not judged by these checks: {}\n",
                        fmt::join(report.unjudged, ", "));
  }
  return text + "\n" + report.verdict() + "\n";
}

std::string json_of(const Report& report) {
  Json checks = Json::array();
  for (const Result& result : report.results) {
    checks.push_back({{"section", title_of(result.check->section)},
                      {"name", result.check->name},
                      {"outcome", kOutcomeNames[static_cast<int>(result.outcome)]},
                      {"reason", result.reason}});
  }
  const Json json = {{"library", report.library},
                     {"claims", report.claims_from},
                     {"conforms", report.conforms()},
                     {"verdict", report.verdict()},
                     {"passed", report.count(Outcome::kPassed)},
                     {"failed", report.count(Outcome::kFailed)},
                     {"absent", report.count(Outcome::kAbsent)},
                     {"not_run", report.count(Outcome::kNotRun)},
                     {"not_judged", report.unjudged},
                     {"checks", checks}};
  // The text of a broken provider may not be UTF-8.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace kvx::conformance
