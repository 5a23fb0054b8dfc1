// copy_blocks into page-shared scales: a warp takes all of a copy's tokens in one head, since their
// scale is made of all of them.
#pragma once

#include "ops/append/encode_page.cuh"
#include "ops/copy_blocks/copy_params.cuh"
#include "ops/cuda/visit_format.cuh"
#include "ops/gather/decode_row_apart.cuh"

namespace kvx::ops::cuda {

struct CopyPageRows {
  const CudaSide& from;
  int64_t block;
  int head;

  __device__ void load(uint32_t token, float* x, int lane) const {
    const RowSource row = {from.codes(block, token, head), from.scales(block, token, head),
                           from.tensor_scale(head)};
    decode_row_apart(from, row, x, lane);
  }
};

// Both sides' page and its scales, as they are.
__device__ inline void copy_page_as_stored(const CopySide& side, const BlockCopy& copy, int head,
                                           int lane) {
  for (int token = 0; token < copy.num_tokens; ++token) {
    copy_as_stored(side, copy_row_at(side, copy, token, head), lane);
  }
}

// blockIdx: copy, head, K or V.
__global__ void __launch_bounds__(PagesLaunch::kThreads)
    copy_pages(const __grid_constant__ CopyParams params) {
  extern __shared__ float shared[];
  const CopySide& side = params.sides[blockIdx.z];
  const int lane = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const BlockCopy copy = copy_at(params, blockIdx.x);
  if (!is_inside(params, copy)) {
    const bool is_first = head == 0 && lane == 0 && blockIdx.z == 0;
    if (is_first) count_outside(params);
    return;
  }
  if (side.is_skipped || copy.num_tokens == 0) return;
  if (side.is_alike && side.from.tensor_scale(head) == side.to.tensor_scale(head)) {
    return copy_page_as_stored(side, copy, head, lane);
  }
  const PageScratch scratch = page_scratch(side.to, shared);
  const CopyPageRows rows = {side.from, copy.from_block, head};
  visit_format(side.to.id, [&]<class Format>() {
    if constexpr (has_pages<Format>()) {
      const PageEncoder<Format, CopyPageRows> encoder{side.to, rows, head, scratch, lane};
      const int nonfinite = encoder.encode({0, {copy.to_block, 0, copy.num_tokens}});
      count_lost(params.counters, side.to, head, nonfinite, 0);
    }
  });
}

}  // namespace kvx::ops::cuda
