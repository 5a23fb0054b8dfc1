// Device counters for calls whose caller passes none.
#pragma once

#include "core/result.hpp"
#include "ops/cuda/device_counters.hpp"

namespace kvx::ops::cuda {

// Counters in the current device's memory that every such call adds to and nobody reads.
Result<DeviceCounters*> ignored_counters();

}  // namespace kvx::ops::cuda
