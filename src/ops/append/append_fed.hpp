// launch_fed: append's kernel for K with error feedback.
#pragma once

#include "core/result.hpp"
#include "ops/append/append_params.cuh"
#include "ops/cuda/context.hpp"

namespace kvx::ops::cuda {

// Whether the kernel takes a side: whole chunks without gaps, and no scale of another row.
inline bool fits_fed(const AppendSide& part) {
  const SideView& side = part.side.view;
  return part.is_stored() && side.feedback != nullptr && side.head_dim % kChunk == 0 &&
         (part.side.group_length % kChunk == 0 || part.side.num_groups == 1) &&
         side.spec.facts->kernels == format::Kernels::kAll &&
         side.spec.scale_source != format::ScaleSource::kPageShared &&
         !side.codes.is_fragmented() && lies_on(16, side.feedback, {});
}

// K, and V too where there are few rows; then it takes V off params. Requires: fits_fed(K).
Status launch_fed(const CudaContext& context, AppendParams& params);

}  // namespace kvx::ops::cuda
