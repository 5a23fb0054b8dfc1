// The options that tuning tries on a cache, in the order in which it tries them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/kvx/tune/candidate.hpp"

namespace kvx::tool {

struct TuningOption {
  std::string name;
  // Adds it; false where the candidate has it already or its formats do not take it.
  std::function<Result<bool>(Candidate&)> add;
};

// A recipe as it stands: no tables but the given scales without which its formats do not run.
Result<Candidate> untuned(const std::string& recipe);

// percentile: the second place, beside the maximum, at which given scales clip.
std::vector<TuningOption> options_of(double percentile);

}  // namespace kvx::tool
