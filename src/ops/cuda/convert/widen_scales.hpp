// widen_scales: 16-bit scales of a v1 cache on a GPU, as the binary32 numbers that kernels read.
#pragma once

#include "ops/copy_rows/views.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

// Scales that blocks or heads share have counts of 1.
struct ScaleCounts {
  int64_t blocks = 1;
  int64_t heads = 1;

  int64_t total() const { return blocks * heads; }
};

// How many scales there are, of a cache of so many blocks and heads.
inline ScaleCounts scale_counts(const copy_rows::ScaleView& scales, int64_t num_blocks,
                                int64_t num_heads) {
  return {scales.block_stride == 0 ? 1 : num_blocks, scales.head_stride == 0 ? 1 : num_heads};
}

// wide: [counts.blocks, counts.heads]. All of it is on the device.
Status widen_scales(const CudaContext& context, const copy_rows::ScaleView& scales,
                    const ScaleCounts& counts, float* wide);

}  // namespace kvx::ops
