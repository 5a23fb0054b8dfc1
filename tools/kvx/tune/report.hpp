// TuneReport: what tuning tried, chose and measured, as tables and as the JSON that goes into the
// file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/kvx/tune/budget.hpp"

namespace kvx::tool {

struct TunedQuality {
  std::string name;
  double bits_per_value = 0;
  double bytes_per_token = 0;  // at the context
  quality::CacheQuality quality;
};

struct TuneReport {
  int num_prompts = 0;
  int64_t num_prompt_tokens = 0;
  std::vector<TriedOption> tried;    // on the selection windows
  std::vector<TunedQuality> judged;  // on the verification windows: the recipe as given, the result
  std::optional<Assignment> plan;    // of a budget
  std::string recipe;                // the result's
  OverrideTexts overrides;
  double seconds = 0;

  std::string text(bool color) const;
  std::string json() const;
  // What the result exceeds; empty where it keeps the goal.
  std::optional<std::string> failure(const Goal& goal) const;
};

}  // namespace kvx::tool
