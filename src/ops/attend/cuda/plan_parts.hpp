// PartsPlan: a call as one launch, or as two: the decodes in front, then the other sequences.
#pragma once

#include <algorithm>
#include <array>

#include "ops/attend/cuda/plan.hpp"

namespace kvx::ops::cuda {

// Neighbour sequences that are planned and launched together.
struct SequencePart {
  int first_sequence = 0;
  int num_sequences = 0;
  CudaAttendLimits limits;  // of the part; total_q counts from row 0 of the call
  CallPlan plan;
};

struct PartsPlan {
  std::array<SequencePart, 2> parts;
  int num_parts = 0;  // 0: the call has nothing to compute

  // The parts are launched one after another and share the workspace.
  int64_t workspace_bytes() const {
    int64_t most = 0;
    for (int i = 0; i < num_parts; ++i) most = std::max(most, parts[i].plan.workspace_bytes());
    return most;
  }
  // Whether a part runs a prefill kernel, which copies q and out on 16 bytes.
  bool has_prefill() const {
    bool has = false;
    for (int i = 0; i < num_parts; ++i) has = has || parts[i].plan.kind() == KernelKind::kPrefill;
    return has;
  }
  bool has_only_decode_mma() const {
    bool has_only = true;
    for (int i = 0; i < num_parts; ++i) {
      for (const RunPlan& run : parts[i].plan.runs) {
        has_only = has_only && run.kind == KernelKind::kDecodeMma && !run.expands;
      }
    }
    return has_only;
  }
};

// Sequences [first, first + num) of a call. Rows of q, out, lse and tree_mask keep their numbers,
// which q_starts holds.
AttendArgs args_of_sequences(const AttendArgs& args, int first, int num);

// Fills the plan, whose memory is reused. Returns false where a run of heads has no kernel of the
// requested path. Requires: check_attend.
bool plan_parts(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
                CudaAttendPath path, PartsPlan& plan);

}  // namespace kvx::ops::cuda
