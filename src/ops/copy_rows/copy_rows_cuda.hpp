// Copies the v1 calls' rows on a GPU. The functions launch kernels on the caller's stream; they
// allocate nothing and do not wait.
//
// Kernels check the arrays that the host cannot read: they skip tokens with a slot or a table entry
// out of range, and rows whose scale is not positive and finite. Where several tokens of a call
// have the same slot, it is unspecified whose bytes are stored.
#pragma once

#include "core/result.hpp"
#include "ops/copy_rows/gather_plan.hpp"
#include "ops/copy_rows/write_plan.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops::copy_rows {

// Requires: a checked plan with at least one token, whose memory the current device can access.
// INTERNAL_ERROR: CUDA refused the launch; the message contains CUDA's own.
Status write_on_device(const CudaContext& context, const WritePlan& plan);
Status gather_on_device(const CudaContext& context, const GatherPlan& plan);

}  // namespace kvx::ops::copy_rows
