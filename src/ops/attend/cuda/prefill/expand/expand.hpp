// Rows that a kernel cannot take: one launch before it writes all tokens of the batch into the
// workspace, in the domain in which they are stored, and the kernel reads those.
//
//   dual-scale blocks   before prefill: become rows of bf16, with the full-precision ones beside
//                       them. A prompt's products take a hundred times as long
//   fp4_row, int4_row   before prefill: become fp8_e4m3, which has all their codes' numbers, with
//                       a scale a row
//   f16, bf16           in fragments, before every kernel: become contiguous
//
//   workspace   [K: blocks][V: blocks][block ids: num_sequences x blocks_of_sequence]
//   blocks      [num_sequences x blocks_of_sequence][heads of the run][block_size][head_dim]; in
//               fp8 each followed by its scales, f32 [heads of the run][block_size]
#pragma once

#include <cuda_runtime_api.h>

#include "ops/attend/args.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops::cuda {

// What a call's rows may take; calls that need more go without a prefill kernel.
inline constexpr int64_t kMostExpandedBytes = int64_t{1} << 30;

// Whether the side has codes of 4 bits under one scale a row.
inline bool has_row_scale(const SideView& side) {
  return side.spec.facts->id == format::FormatId::kFp4Row ||
         side.spec.facts->id == format::FormatId::kInt4Row;
}

// Whether a run's rows become fp8, or its blocks bf16, before a prefill kernel.
inline bool expands_to_fp8(const HeadRun& run) {
  return has_row_scale(run.k) && has_row_scale(run.v);
}
// Whether a run's rows of 16 bits, some of them in fragments, are joined before any fast kernel.
bool joins_fragments(const HeadRun& run);
inline bool expands_for_prefill(const HeadRun& run) {
  return (run.k.spec.is_dual() && run.v.spec.is_dual()) || expands_to_fp8(run) ||
         joins_fragments(run);
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
// workspace's part for them. Beside fp8 and joined rows a full-precision window stays where it is.
// run: filled.
AttendArgs expanded_args(const AttendArgs& args, const HeadRun& of_call, int64_t max_tokens,
                         uint8_t* workspace, HeadRun& run);

// Fills what expanded_args() points to. Blocks that are not there have the id -1.
cudaError_t launch_expand_rows(const AttendArgs& args, const HeadRun& of_call,
                               const AttendArgs& expanded, cudaStream_t stream);
// The same for rows whose fragments are joined.
cudaError_t launch_join_fragments(const AttendArgs& args, const HeadRun& of_call,
                                  const AttendArgs& expanded, cudaStream_t stream);

}  // namespace kvx::ops::cuda
