// gather on a GPU.
#pragma once

#include "ops/cuda/context.hpp"
#include "ops/gather/gather.hpp"

namespace kvx::ops {

// As gather on the CPU, on the context's stream; the ranges are in device memory. max_tokens: of
// any range. Ranges, and tokens of blocks, that are out of range are skipped and counted.
Status gather(const CudaContext& context, const GatherArgs& args, int64_t max_tokens,
              CudaFindings* findings);

}  // namespace kvx::ops
