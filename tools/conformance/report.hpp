// Report: the results of a provider's checks, as a table for people and as JSON for programs.
#pragma once

#include "tools/conformance/runner.hpp"

namespace kvx::conformance {

struct Report {
  std::string library;
  std::string claims_from;                 // "v1.1" or "queried"
  std::vector<std::string> unjudged = {};  // claimed, but no check of this run needs it
  std::vector<Result> results = {};

  int count(Outcome outcome) const;
  bool conforms() const { return count(Outcome::kFailed) == 0 && count(Outcome::kPassed) > 0; }
  std::string verdict() const;  // one line
};

std::string text_of(const Report& report);
std::string json_of(const Report& report);

}  // namespace kvx::conformance
