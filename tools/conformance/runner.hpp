// Runs checks, each in a process of its own: a provider that crashes or hangs fails that check, and
// the others are still asked.
#pragma once

#include "tools/conformance/check.hpp"

namespace kvx::conformance {

enum class Outcome { kPassed, kFailed, kAbsent, kNotRun };

struct Result {
  const Check* check;
  Outcome outcome;
  std::string reason;  // why it failed, what is absent, what is missing to run it
  Features missing = {};
};

// kvx_query_features, asked in a process of its own: once a process has asked CUDA for its devices,
// its children cannot use them.
kvx_status_t query_in_child(const Provider& provider, kvx_features_t& features);

bool has_gpu();

Result run_check(const Check& check, const Provider& provider, const Features& claims,
                 bool has_gpu);

}  // namespace kvx::conformance
