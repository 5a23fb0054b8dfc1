// attend on a GPU: checks the call, plans it, and launches the plan.
#include "ops/attend/attend_cuda.hpp"

#include <algorithm>

#include "core/scratch.hpp"
#include "ops/attend/cuda/launch_run.hpp"
#include "ops/attend/cuda/plan.hpp"

namespace kvx::ops {
namespace {

using cuda::CallPlan;
using cuda::KernelKind;

// Whether kernels of this path accept the call, of any number of queries.
bool has_kernels(const CudaContext& context, const AttendArgs& args, CudaAttendPath path) {
  Scratch<CallPlan> plan;
  return cuda::choose_kernels(context, args, 1, path, *plan);
}

// The reference kernel accepts rows of any length of which the device's shared memory holds
// sixteen.
Status check_shared_memory(const CudaContext& context, const AttendArgs& args) {
  const bool has_offset = args.transform.k.block_offset != nullptr;
  const int most = context.device.shared_bytes_per_cta;
  for (const HeadRun& run : args.packed.runs) {
    const int least =
        cuda::least_reference_shared_bytes(run.k.head_dim, run.v.head_dim, has_offset);
    if (least <= most) continue;
    return unsupported("head_dim {} and {} need {} bytes of shared memory; CUDA device {} has {}",
                       run.k.head_dim, run.v.head_dim, least, context.device.index, most);
  }
  return {};
}

}  // namespace

bool attend_has_decode_mma(const CudaContext& context, const AttendArgs& args) {
  return has_kernels(context, args, CudaAttendPath::kDecodeMma);
}

bool attend_has_prefill(const CudaContext& context, const AttendArgs& args) {
  return has_kernels(context, args, CudaAttendPath::kPrefill);
}

bool attend_takes_interleaved_order(const CudaContext& context, const HeadRun& run,
                                    int block_size) {
  for (const SideView* side : {&run.k, &run.v}) {
    const bool is_page_shared = side->spec.scale_source == format::ScaleSource::kPageShared;
    if (!side->is_stored() || is_page_shared) return false;
  }
  HeadRun is_interleaved = run;
  is_interleaved.k.is_interleaved = is_interleaved.v.is_interleaved = true;
  AttendArgs args;
  args.packed = {1, block_size, run.num_heads, {&is_interleaved, 1}};
  return has_kernels(context, args, CudaAttendPath::kDecodeMma);
}

int64_t attend_workspace_bytes(const CudaContext& context, const AttendArgs& args,
                               const CudaAttendLimits& limits, CudaAttendPath path) {
  Scratch<CallPlan> plan;
  if (!cuda::plan_attend(context, args, limits, path, *plan)) return 0;
  const int64_t bytes = plan->workspace_bytes();
  if (path != CudaAttendPath::kChoose || plan->kind() != KernelKind::kPrefill) return bytes;
  // The call's q and out may lie where prefill does not accept them.
  if (!cuda::plan_attend(context, args, limits, CudaAttendPath::kDecodeMma, *plan))
    cuda::plan_attend(context, args, limits, CudaAttendPath::kReference, *plan);
  return std::max(bytes, plan->workspace_bytes());
}

Status attend(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
              uint8_t* workspace, DeviceCounters* counters, CudaAttendPath path) {
  KVX_RETURN_IF_ERROR(check_attend(args, limits));
  const bool is_empty = args.num_sequences == 0 || limits.total_q == 0;
  if (is_empty && path == CudaAttendPath::kChoose) return {};
  Scratch<CallPlan> plan;
  if (!cuda::plan_attend(context, args, limits, path, *plan)) {
    const char* kernel = path == CudaAttendPath::kDecodeMma ? "decode_mma" : "prefill";
    return unsupported("no {} kernel accepts this call (attend_has_{})", kernel, kernel);
  }
  if (is_empty) return {};
  KVX_RETURN_IF_ERROR(check_shared_memory(context, args));
  const cuda::AttendCall call = {context, args, limits, workspace, counters};
  for (size_t i = 0; i < plan->runs.size(); ++i) {
    KVX_RETURN_IF_ERROR(cuda::launch_run(call, args.packed.runs[i], plan->runs[i]));
  }
  return {};
}

}  // namespace kvx::ops
