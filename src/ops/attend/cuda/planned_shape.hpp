// PlannedShape: what a plan depends on of the call that it was made with, and whether another call
// agrees with it.
#pragma once

#include <vector>

#include "ops/attend/attend_cuda.hpp"

namespace kvx::ops::cuda {

struct PlannedShape {
  // Keeps the shapes of args, whose spans of runs need not live longer.
  void keep(const AttendArgs& args);

  // INVALID_ARGUMENT names what differs. Addresses may, unless they are aligned otherwise on 16
  // bytes. has_prefill: the plan's kernels copy q and out on 16 bytes.
  Status check(const AttendArgs& args, bool has_prefill) const;

  AttendArgs args;  // its views' spans and its pointers are not used
  std::vector<HeadRun> packed_runs;
  std::vector<HeadRun> full_precision_runs;
};

}  // namespace kvx::ops::cuda
