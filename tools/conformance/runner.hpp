// Runs each check in a process of its own, so that a provider that crashes or hangs fails that
// check only.
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

// Calls kvx_query_features in a process of its own: after a process has initialised CUDA, its
// children cannot use it.
kvx_status_t query_in_child(const Provider& provider, kvx_features_t& features);

bool has_gpu();

Result run_check(const Check& check, const Provider& provider, const Features& claims,
                 bool has_gpu);

}  // namespace kvx::conformance
