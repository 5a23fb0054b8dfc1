// Prompts over dual-scale blocks: one launch before the prefill kernel turns all tokens of the
// batch into rows of bf16 in the workspace, in the domain in which they are stored, and the kernel
// reads those. A prompt's products take a hundred times as long.
//
//   workspace   [K: blocks][V: blocks][block ids: num_sequences x blocks_of_sequence]
//   blocks      [num_sequences x blocks_of_sequence][heads of the run][block_size][head_dim], bf16
#pragma once

#include <cuda_runtime_api.h>

#include "ops/attend/args.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops::cuda {

// What a call's rows may take; calls that need more go without a prefill kernel.
inline constexpr int64_t kMostExpandedBytes = int64_t{1} << 30;

// Whether a run's blocks are expanded before a prefill kernel.
inline bool expands_for_prefill(const HeadRun& run) {
  return run.k.spec.is_dual() && run.v.spec.is_dual();
}

struct ExpandedLayout {
  int64_t blocks_of_sequence = 0;
  int64_t num_blocks = 0;
  int64_t values_at = 0;
  int64_t ids_at = 0;
  int64_t bytes = 0;
};
// max_tokens: of a sequence.
ExpandedLayout expanded_layout(const AttendArgs& args, const HeadRun& run, int64_t max_tokens);

// The call over expanded rows, which `run` becomes the only run of heads of: a view of the
// workspace's part for them. run: filled.
AttendArgs expanded_args(const AttendArgs& args, const HeadRun& of_call, int64_t max_tokens,
                         uint8_t* workspace, HeadRun& run);

// Fills what expanded_args() points to. Blocks that are not there have the id -1.
cudaError_t launch_expand_rows(const AttendArgs& args, const HeadRun& of_call,
                               const AttendArgs& expanded, cudaStream_t stream);

}  // namespace kvx::ops::cuda
