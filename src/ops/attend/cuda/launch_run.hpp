// launch_run: one run of heads as its plan says.
#pragma once

#include "ops/attend/cuda/plan.hpp"

namespace kvx::ops::cuda {

// A call of attend. The workspace is as large as its plan wants it.
struct AttendCall {
  const CudaContext& context;
  const AttendArgs& args;
  const CudaAttendLimits& limits;
  uint8_t* workspace;
  DeviceCounters* counters;
};

// Launches the kernel of the run's plan and, where it needs one, the merge of its splits.
Status launch_run(const AttendCall& call, const HeadRun& run, const RunPlan& plan);

}  // namespace kvx::ops::cuda
