// Where kernels count for callers who do not ask.
#pragma once

#include "core/result.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::boundary {

// Of the current device; any call adds to them, nobody reads them.
Result<ops::DeviceCounters*> ignored_counters();

}  // namespace kvx::boundary
