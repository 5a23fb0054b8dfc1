// Which calls the latent kernel accepts, and how it cuts them.
#pragma once

#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cuda/plan_work_tiles.hpp"

namespace kvx::ops::cuda {

// The second segment of K's rows, of the run that has the first of these heads; null: there is
// none.
const HeadRun* second_segment(const LayerView& layer, const HeadRun& run);

// The instance of the latent kernel that accepts a run whose V is a prefix of K's rows; without a
// function where there is none.
LatentKernel latent_instance(const CudaContext& context, const AttendArgs& args,
                             const HeadRun& run);

// By how much a number's index is shifted to find its scale among its row's (fp8).
int latent_scale_shift(const format::FormatSpec& spec);

// Splits for the longest sequence that may come, or, where sequences may be much longer than
// others, a budget of work tiles that the device shares out by their lengths. most_parts: partial
// results that the workspace has room for.
void plan_latent(const CudaContext& context, const AttendArgs& args, SplitShape shape,
                 int64_t most_parts, WorkTilePlan& plan);

}  // namespace kvx::ops::cuda
