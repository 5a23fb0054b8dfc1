// Which calls the latent kernels accept, and how they are cut.
#pragma once

#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cuda/plan_work_tiles.hpp"

namespace kvx::ops::cuda {

// The second segment of K's rows, of the run that has the first of these heads; null: there is
// none.
const HeadRun* second_segment(const LayerView& layer, const HeadRun& run);

// The instance of a latent kernel that accepts a run whose V is a prefix of K's rows; without a
// function where there is none. may_have_wgmma: that kernel comes first.
LatentKernel latent_instance(const CudaContext& context, const AttendArgs& args, const HeadRun& run,
                             bool may_have_wgmma);

// By how much a number's index is shifted to find its scale among its row's (fp8).
int latent_scale_shift(const format::FormatSpec& spec);

// The plan has its instance. Splits for the longest sequence that may come, or, where sequences may
// be much longer than others, a budget of work tiles that the device shares out by their lengths.
// most_parts: partial results that the workspace has room for.
void plan_latent(const CudaContext& context, const AttendArgs& args, SplitShape shape,
                 int64_t most_parts, WorkTilePlan& plan);

}  // namespace kvx::ops::cuda
