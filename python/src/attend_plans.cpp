// A model's layers differ in a few ways (sliding windows, formats): so many plans are kept.
#include "python/src/attend_plans.hpp"

#include <utility>

namespace kvx::python {
namespace {

constexpr size_t kMaxPlans = 4;

Status launch(const ops::CudaContext& context, const ops::AttendArgs& args,
              const ops::AttendPlan& plan, const GivenWorkspace& given,
              ops::DeviceCounters* counters) {
  KVX_ASSIGN_OR_RETURN(uint8_t* const workspace,
                       workspace_of(context, plan.workspace_bytes(), given));
  return ops::attend(context, args, plan, workspace, counters);
}

}  // namespace

Status AttendPlans::attend(const ops::CudaContext& context, const ops::AttendArgs& args,
                           const ops::CudaAttendLimits& limits, const GivenWorkspace& given,
                           ops::DeviceCounters* counters) {
  const Shape shape = {args.num_sequences, args.max_blocks_per_sequence,
                       args.num_q_heads,   args.window,
                       args.q.dtype,       limits.max_q_len,
                       limits.total_q,     limits.max_tokens,
                       limits.num_decodes};
  const std::lock_guard lock(mutex_);
  for (size_t i = plans_.size(); i-- > 0;) {
    if (plans_[i].shape != shape) continue;
    Status launched = launch(context, args, plans_[i].plan, given, counters);
    // A plan of another layer refuses this one; a call that nothing accepts is refused below.
    if (launched.ok() || launched.error().code != ErrorCode::kInvalidArgument) return launched;
  }
  KVX_ASSIGN_OR_RETURN(ops::AttendPlan plan, ops::AttendPlan::make(context, args, limits));
  KVX_RETURN_IF_ERROR(launch(context, args, plan, given, counters));
  if (plans_.size() == kMaxPlans) plans_.erase(plans_.begin());
  plans_.push_back({shape, std::move(plan)});
  return {};
}

}  // namespace kvx::python
