// PlannedShape: what a plan depends on of the call that it was made with, and whether another call
// agrees with it.
#pragma once

#include <vector>

#include "ops/attend/attend_cuda.hpp"

namespace kvx::ops::cuda {

// Whether all rows of q and out begin on 16 bytes, where alone prefill kernels accept them.
bool has_rows_on_16(const AttendArgs& args);

struct PlannedShape {
  // Keeps the shapes of args, whose runs of heads need not live longer. Reuses memory.
  void keep(const AttendArgs& args);

  // The first thing that the plan depends on and in which the call differs; null: none. Addresses
  // may differ, unless those of a layer are aligned otherwise on 16 bytes. Rows of q and out are
  // left to the caller.
  const char* difference_from(const AttendArgs& args) const;

  AttendArgs args;  // its pointers, and its views' runs, are not used
  std::vector<HeadRun> packed_runs;
  std::vector<HeadRun> full_precision_runs;
  // Of the rows' second segment; empty where there is none.
  std::vector<HeadRun> packed_more;
  std::vector<HeadRun> full_precision_more;
  bool rows_are_on_16 = false;
};

}  // namespace kvx::ops::cuda
