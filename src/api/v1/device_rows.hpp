// The v1 calls' rows on a GPU: launches on the caller's stream, which allocate nothing and wait for
// nothing.
//
// What the host cannot look at is looked at there: tokens with a slot or a table entry that leads
// nowhere are skipped, and so are rows whose scale is not positive and finite. Of equal slots in
// one call any token's bytes stay.
#pragma once

#include "api/v1/gather_plan.hpp"
#include "api/v1/write_plan.hpp"
#include "core/result.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::boundary {

// Requires: a checked plan whose memory the current device reaches, at least one token.
// INTERNAL_ERROR: CUDA refuses the launch, with its words.
Status write_on_device(const ops::CudaContext& context, const WritePlan& plan);
Status gather_on_device(const ops::CudaContext& context, const GatherPlan& plan);

}  // namespace kvx::boundary
