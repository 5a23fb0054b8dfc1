// copy_blocks on a GPU.
#pragma once

#include "ops/copy_blocks/copy_blocks.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

// As copy_blocks on the CPU, on the context's stream, all pairs in one launch a run of heads; the
// copies are in device memory, num_copies of them. Rows of one call are copied side by side: a
// block that is one copy's source must not be another's target. Copies out of range are skipped and
// counted. INVALID_ARGUMENT or UNSUPPORTED, nothing written: geometries that differ, runs that are
// cut differently, page-shared scales that would have to be made.
Status copy_blocks(const CudaContext& context, const LayerView& from, const LayerView& to,
                   const BlockCopy* copies, int64_t num_copies, CudaFindings* findings);

}  // namespace kvx::ops
