// plan_attend: the only place that chooses how a call of attend runs on a GPU. The workspace query,
// the questions attend_has_*, and the launch all follow the plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cuda/plan_work_tiles.hpp"

namespace kvx::ops::cuda {

enum class KernelKind : uint8_t { kReference, kDecodeMma, kLatent, kPrefill };

// Where the partial results of split rows lie in the workspace:
//   [partial_out][partial_softmax][work tiles of each sequence][scores of K's block offsets]
//   [rows of bf16 that prefill reads in the place of dual-scale blocks], each on 256 bytes
struct WorkspaceLayout {
  int64_t softmax_at = 0;
  int64_t work_tiles_at = 0;
  int64_t key_offsets_at = 0;
  int64_t expanded_at = 0;
  int64_t bytes = 0;  // 0: every row is finished by one CTA or cluster
};

// How one run of heads is launched.
struct RunPlan {
  KernelKind kind = KernelKind::kReference;
  WorkTilePlan work_tiles;    // with the instance of the kernel
  ReferenceLaunch reference;  // of the reference kernel alone
  LaunchGrid grid;
  WorkspaceLayout workspace;
  bool needs_merge = false;  // a second launch merges the splits of each row
  bool expands = false;      // a launch before it makes the rows (prefill/expand/expand.hpp)
};

// All runs of a call take kernels of one kind.
struct CallPlan {
  std::vector<RunPlan> runs;  // in the order of args.packed.runs

  // Requires: planned. A layer has at least one run.
  KernelKind kind() const { return runs.front().kind; }

  // The runs are launched one after another and share the workspace.
  int64_t workspace_bytes() const {
    int64_t most = 0;
    for (const RunPlan& run : runs) most = std::max(most, run.workspace.bytes);
    return most;
  }
};

// The first half of plan_attend: the kernel and its instance for every run. Returns false where a
// run has no kernel of the requested path; kChoose and kReference always have one.
// num_rows: query rows of a sequence and KV head, at most.
bool choose_kernels(const CudaContext& context, const AttendArgs& args, int64_t num_rows,
                    CudaAttendPath path, CallPlan& plan);

// Fills the plan, whose memory is reused. Returns what choose_kernels does.
bool plan_attend(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
                 CudaAttendPath path, CallPlan& plan);

// Workspace, at most, of every plan of these runs of heads with that many sequences and query rows
// or fewer, for sequences of up to max_tokens; choose_kernels has chosen the plan's kernels.
int64_t most_workspace_bytes(const AttendArgs& args, const CudaAttendBounds& bounds,
                             const CallPlan& plan);

// Tokens of a sequence, at most: what the caller's limit and the block table allow.
int64_t max_tokens_of(const AttendArgs& args, const CudaAttendLimits& limits);

}  // namespace kvx::ops::cuda
