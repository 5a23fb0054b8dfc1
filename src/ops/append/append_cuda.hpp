// append on a GPU.
#pragma once

#include "ops/append/append.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

// As append on the CPU, byte for byte, on the context's stream; the spans are in device memory.
// Slots and positions out of range are skipped and counted in *counters (device memory). Duplicate
// slots in one call: either token wins. One launch a run of heads; two where K alone or V alone has
// page-shared scales, or where K has error feedback and the rows are many.
Status append(const CudaContext& context, const AppendArgs& args, DeviceCounters* counters);

}  // namespace kvx::ops
