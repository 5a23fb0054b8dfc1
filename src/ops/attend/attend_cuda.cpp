// attend on a GPU: checks the call, plans it, and launches the plan.
#include "ops/attend/attend_cuda.hpp"

#include <algorithm>
#include <vector>

#include "core/scratch.hpp"
#include "ops/attend/cuda/launch_run.hpp"
#include "ops/attend/cuda/plan_parts.hpp"
#include "ops/attend/cuda/planned_shape.hpp"

namespace kvx::ops {
namespace {

using cuda::CallPlan;
using cuda::PartsPlan;

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
        cuda::least_reference_shared_bytes(args.packed.key_dim(), run.v.head_dim, has_offset);
    if (least <= most) continue;
    return unsupported("head_dim {} and {} need {} bytes of shared memory; CUDA device {} has {}",
                       args.packed.key_dim(), run.v.head_dim, least, context.device.index, most);
  }
  return {};
}

// Checks a call and plans it; without parts where it has nothing to compute.
Status plan_call(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
                 CudaAttendPath path, PartsPlan& plan) {
  KVX_RETURN_IF_ERROR(check_attend(args, limits));
  const bool is_empty = args.num_sequences == 0 || limits.total_q == 0;
  const bool is_planned = is_empty ? has_kernels(context, args, path)
                                   : cuda::plan_parts(context, args, limits, path, plan);
  if (!is_planned) {
    const bool is_latent = path == CudaAttendPath::kLatent || path == CudaAttendPath::kLatentMma;
    const char* kernel = path == CudaAttendPath::kDecodeMma ? "decode_mma"
                         : is_latent                        ? "latent"
                                                            : "prefill";
    return unsupported("no {} kernel accepts this call (attend_has_{})", kernel, kernel);
  }
  if (!is_empty) return check_shared_memory(context, args);
  plan.num_parts = 0;
  return {};
}

Status launch_parts(const CudaContext& context, const AttendArgs& args, const PartsPlan& plan,
                    uint8_t* workspace, DeviceCounters* counters) {
  for (int i = 0; i < plan.num_parts; ++i) {
    const cuda::SequencePart& part = plan.parts[i];
    const AttendArgs of_part =
        cuda::args_of_sequences(args, part.first_sequence, part.num_sequences);
    const cuda::AttendCall call = {context, of_part, part.limits, workspace, counters};
    for (size_t run = 0; run < part.plan.runs.size(); ++run) {
      KVX_RETURN_IF_ERROR(cuda::launch_run(call, args.packed.runs[run], part.plan.runs[run]));
    }
  }
  return {};
}

}  // namespace

bool attend_has_decode_mma(const CudaContext& context, const AttendArgs& args) {
  return has_kernels(context, args, CudaAttendPath::kDecodeMma);
}

bool attend_has_latent(const CudaContext& context, const AttendArgs& args) {
  return has_kernels(context, args, CudaAttendPath::kLatent);
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
  Scratch<PartsPlan> plan;
  if (!cuda::plan_parts(context, args, limits, path, *plan)) return 0;
  const int64_t bytes = plan->workspace_bytes();
  if (path != CudaAttendPath::kChoose || !plan->has_prefill()) return bytes;
  // The call's q and out may lie where prefill does not accept them.
  if (!cuda::plan_parts(context, args, limits, CudaAttendPath::kDecodeMma, *plan))
    cuda::plan_parts(context, args, limits, CudaAttendPath::kReference, *plan);
  return std::max(bytes, plan->workspace_bytes());
}

int64_t attend_workspace_bytes_up_to(const CudaContext& context, const AttendArgs& args,
                                     const CudaAttendBounds& bounds, CudaAttendPath path) {
  // Prefill takes no more than what runs where it does not accept the rows.
  if (path == CudaAttendPath::kChoose) {
    path = attend_has_latent(context, args) ? CudaAttendPath::kLatent : CudaAttendPath::kDecodeMma;
  }
  const int q_per_kv = args.num_q_heads / args.packed.num_kv_heads;
  Scratch<CallPlan> plan;
  int64_t most = 0;
  for (const int q_len : {1, bounds.max_q_len}) {  // instances differ by the number of rows alone
    const int64_t num_rows = int64_t{q_len} * q_per_kv;
    if (!cuda::choose_kernels(context, args, num_rows, path, *plan))
      cuda::choose_kernels(context, args, num_rows, CudaAttendPath::kReference, *plan);
    most = std::max(most, cuda::most_workspace_bytes(args, bounds, *plan));
  }
  return most;
}

struct AttendPlan::Choices {
  int device = 0;
  CudaAttendLimits limits;
  cuda::PlannedShape shape;
  PartsPlan parts;

  // Reuses the memory of an earlier plan.
  Status fill(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& of_call,
              CudaAttendPath path) {
    KVX_RETURN_IF_ERROR(plan_call(context, args, of_call, path, parts));
    device = context.device.index;
    limits = of_call;
    shape.keep(args);
    return {};
  }
  bool reads_in_place() const {
    const AttendArgs& args = shape.args;
    if (args.window_sinks > 0 || args.num_sink_blocks || args.transform.k.block_offset)
      return false;
    return parts.has_only_decode_mma();
  }
  // Whether it is what fill() would choose for this call.
  bool serves(const CudaContext& context, const AttendArgs& args,
              const CudaAttendLimits& of_call) const {
    return device == context.device.index && limits == of_call &&
           shape.rows_are_on_16 == cuda::has_rows_on_16(args) &&
           shape.difference_from(args) == nullptr;
  }
};

AttendPlan::AttendPlan(std::unique_ptr<Choices> choices) : choices_(std::move(choices)) {}
AttendPlan::AttendPlan(AttendPlan&&) noexcept = default;
AttendPlan& AttendPlan::operator=(AttendPlan&&) noexcept = default;
AttendPlan::~AttendPlan() = default;

int64_t AttendPlan::workspace_bytes() const {
  return choices_->parts.workspace_bytes();
}

const CudaAttendLimits& AttendPlan::limits() const {
  return choices_->limits;
}

bool AttendPlan::reads_in_place() const {
  return choices_->reads_in_place();
}

Result<AttendPlan> AttendPlan::make(const CudaContext& context, const AttendArgs& args,
                                    const CudaAttendLimits& limits, CudaAttendPath path) {
  auto choices = std::make_unique<Choices>();
  KVX_RETURN_IF_ERROR(choices->fill(context, args, limits, path));
  return AttendPlan(std::move(choices));
}

Result<const AttendPlan*> AttendPlan::of_thread(const CudaContext& context, const AttendArgs& args,
                                                const CudaAttendLimits& limits) {
  constexpr size_t kMost = 8;  // a model's kinds of layers, each with decodes and prompts
  thread_local std::vector<AttendPlan> plans;
  thread_local size_t oldest = 0;
  for (const AttendPlan& plan : plans) {
    if (plan.choices_->serves(context, args, limits)) return &plan;
  }
  if (plans.size() < kMost) {
    plans.reserve(kMost);
    KVX_ASSIGN_OR_RETURN(AttendPlan plan, make(context, args, limits));
    plans.push_back(std::move(plan));
    return &plans.back();
  }
  AttendPlan& plan = plans[oldest];
  oldest = (oldest + 1) % kMost;
  const Status filled = plan.choices_->fill(context, args, limits, CudaAttendPath::kChoose);
  if (filled.ok()) return &plan;
  plan.choices_->device = -1;  // it serves no call
  return filled.error();
}

Status attend(const CudaContext& context, const AttendArgs& args, const AttendPlan& plan,
              uint8_t* workspace, DeviceCounters* counters) {
  const AttendPlan::Choices& choices = plan.choices();
  if (context.device.index != choices.device) {
    return invalid_argument("the context has CUDA device {}; expected the plan's, {}",
                            context.device.index, choices.device);
  }
  KVX_RETURN_IF_ERROR(check_attend(args, choices.limits));
  if (const char* name = choices.shape.difference_from(args)) {
    return invalid_argument(
        "{} differs from the call that the plan was made with; expected the same, or a plan of "
        "its own",
        name);
  }
  if (!args.in_place.is_plain() && !choices.reads_in_place()) {
    return invalid_argument(
        "in_place is not plain; expected packed entries for the plan's kernels");
  }
  if (choices.parts.has_prefill() && !cuda::has_rows_on_16(args)) {
    return invalid_argument(
        "q or out has rows off 16 bytes, where the plan's prefill kernel does not accept them; "
        "expected rows on 16 bytes, or a plan that was made with these rows");
  }
  return launch_parts(context, args, choices.parts, workspace, counters);
}

Status attend(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
              uint8_t* workspace, DeviceCounters* counters, CudaAttendPath path) {
  if (!args.in_place.is_plain()) {
    return invalid_argument("in_place is not plain; expected a plan, which says what it takes");
  }
  Scratch<PartsPlan> plan;
  KVX_RETURN_IF_ERROR(plan_call(context, args, limits, path, *plan));
  return launch_parts(context, args, *plan, workspace, counters);
}

}  // namespace kvx::ops
