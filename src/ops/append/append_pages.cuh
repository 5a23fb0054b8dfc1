// append under page-shared scales: a warp takes a head's runs of tokens in the call's order, as one
// scale's history is; blocks are shared out to stripes of warps.
#pragma once

#include "ops/append/append_params.cuh"
#include "ops/append/page_runs.cuh"
#include "ops/cuda/floats.cuh"
#include "ops/cuda/visit_format.cuh"

namespace kvx::ops::cuda {

struct AppendTokens {
  const AppendParams& params;
  const AppendSide& part;

  __device__ uint32_t num_tokens() const { return params.num_tokens; }
  __device__ int block_size() const { return params.block_size; }
  __device__ int64_t slot(uint32_t token) const {
    const int64_t slot = params.slot_mapping[token];
    return append_target(params, part, token, slot, false).is_stored ? slot : -1;
  }
  __device__ TokenRun place(int64_t slot) const { return place_of_slot(params, slot); }
};

struct AppendRows {
  const AppendParams& params;
  const AppendSide& part;
  int head;  // of the run of heads

  __device__ void load(uint32_t token, float* x, int lane) const {
    const int head_dim = part.side.view.head_dim;
    const uint8_t* input = part.input_row(token, params.first_head + head);
    for (int d = lane; d < head_dim; d += kWarp) x[d] = load_float(part.input.dtype, input, d);
    const int64_t block =
        part.transform.block_offset ? params.positions[token] / params.block_size : 0;
    apply_transform_row(append_transform(params, part, head, block), x, head_dim, lane);
  }
};

// Counts what append_target finds out of range, once a token.
__device__ inline void count_out_of_range(const AppendParams& params, const AppendSide& part,
                                          int lane) {
  for (uint32_t token = static_cast<uint32_t>(lane); token < params.num_tokens; token += kWarp) {
    append_target(params, part, token, params.slot_mapping[token], true);
  }
}

// blockIdx: stripe, head, K or V.
__global__ void __launch_bounds__(PagesLaunch::kThreads)
    append_pages(const __grid_constant__ AppendParams params) {
  extern __shared__ float shared[];
  const AppendSide& part = params.sides[blockIdx.z];
  if (!part.is_stored()) return;
  const int lane = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  if (blockIdx.x == 0 && head == 0) count_out_of_range(params, part, lane);
  const PageScratch scratch = page_scratch(part.side, shared);
  const AppendRows rows = {params, part, head};
  visit_format(part.side.id, [&]<class Format>() {
    if constexpr (has_pages<Format>()) {
      const PageEncoder<Format, AppendRows> encoder{part.side, rows, head, scratch, lane};
      const AppendTokens tokens = {params, part};
      const int nonfinite = encode_stripe(encoder, tokens, static_cast<int>(blockIdx.x));
      count_lost(params.counters, part.side, head, nonfinite, 0);
    }
  });
}

}  // namespace kvx::ops::cuda
