// The launch of copy_blocks into dual-scale blocks.
#pragma once

#include "ops/copy_blocks/copy_params.cuh"

namespace kvx::ops::cuda {

// Sides that are not skipped have dual-scale targets.
Status launch_dual(const CudaContext& context, const CopyParams& params);

}  // namespace kvx::ops::cuda
