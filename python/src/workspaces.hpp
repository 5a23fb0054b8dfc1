// Device memory that attention needs for the length of a call: the caller's, or one that the
// process keeps.
//
// A process keeps two workspaces a size that was needed: one for each stream, since work of one
// stream follows one another, and one a device for graphs. Both grow with the calls that are not
// captured, so a captured call finds what an earlier one of its size needed. Graphs share theirs:
// those that run side by side are captured with workspaces of their own.
#pragma once

#include <cstdint>

#include "ops/cuda/context.hpp"

namespace kvx::python {

// Memory that the caller gives; none where data is null.
struct GivenWorkspace {
  uint8_t* data = nullptr;
  int64_t bytes = 0;
};

// At least so many bytes, on 256. INVALID_ARGUMENT: the given one is smaller or begins elsewhere.
// UNSUPPORTED: the stream captures, and no call before it needed that much. Requires: the
// context's device is the current one.
Result<uint8_t*> workspace_of(const ops::CudaContext& context, int64_t bytes,
                              const GivenWorkspace& given);

}  // namespace kvx::python
