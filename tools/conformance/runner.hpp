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

// Fills features by kvx_query_features in a process of its own: after a process has initialised
// CUDA, its children cannot use it.
kvx_status_t query_in_child(const Provider& provider, kvx_features_t& features);

bool has_gpu();

// The check of that number.
Result run_check(const std::vector<Check>& checks, size_t number, const Provider& provider,
                 const Features& claims, bool has_gpu);

// Does the task that this process was started for (task_of_this_process()) and ends it.
[[noreturn]] void do_task(const std::string& task, const std::string& library);

}  // namespace kvx::conformance
