// launch_append_dual: append's kernel for dual-scale blocks.
#pragma once

#include "core/result.hpp"
#include "ops/append/append_params.cuh"
#include "ops/cuda/context.hpp"

namespace kvx::ops::cuda {

inline bool is_dual(const AppendSide& part) {
  return part.is_stored() && part.side.view.spec.is_dual();
}

// window: the type that rows are rounded to before they are quantised. Requires: the sides that are
// stored are dual-scale.
Status launch_append_dual(const CudaContext& context, const AppendParams& params, DType window);

}  // namespace kvx::ops::cuda
