// The verbs on a GPU in a build without CUDA. They cannot be reached: no context can be made
// (device/no_cuda.cpp).
#include "ops/append/append_cuda.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/cuda/convert/pack_table.hpp"
#include "ops/cuda/convert/pointer_ids.hpp"
#include "ops/cuda/convert/widen_scales.hpp"
#include "ops/cuda/ignored_counters.hpp"
#include "ops/gather/gather_cuda.hpp"
#include "ops/process_rows/process_rows.hpp"
#include "ops/transcode/transcode_cuda.hpp"
#include "ops/turn_scales/turn_scales.hpp"
#include "ops/window/plan_window.hpp"

namespace kvx::ops {
namespace {

Error no_cuda() {
  return unsupported("this build of kvx has no CUDA (KVX_CUDA was OFF, or nvcc was not found)");
}

}  // namespace

Status pack_table(const CudaContext&, const PackTable&, int32_t*, int32_t*) {
  return no_cuda();
}
Status widen_scales(const CudaContext&, const copy_rows::ScaleView&, const ScaleCounts&, float*) {
  return no_cuda();
}
Status pointer_ids(const CudaContext&, const PointerTable&, int32_t*, DeviceCounters*) {
  return no_cuda();
}
Status turn_scales(const CudaContext&, const ScaleRows&, bool) {
  return no_cuda();
}
Status append(const CudaContext&, const AppendArgs&, DeviceCounters*) {
  return no_cuda();
}
Status process_rows(const CudaContext&, const ProcessRows&, DeviceCounters*) {
  return no_cuda();
}
Status gather(const CudaContext&, const GatherArgs&, const CudaGatherRanges&, int64_t,
              DeviceCounters*) {
  return no_cuda();
}
Status gather(const CudaContext&, const GatherArgs&, int64_t, DeviceCounters*) {
  return no_cuda();
}
Status copy_blocks(const CudaContext&, const LayerView&, const LayerView&, const CudaBlockCopies&,
                   DeviceCounters*) {
  return no_cuda();
}
Status transcode(const CudaContext&, const TranscodeArgs&, DeviceCounters*) {
  return no_cuda();
}
bool attend_has_decode_mma(const CudaContext&, const AttendArgs&) {
  return false;
}
bool attend_has_prefill(const CudaContext&, const AttendArgs&) {
  return false;
}
bool attend_takes_interleaved_order(const CudaContext&, const HeadRun&, int) {
  return false;
}
int64_t attend_workspace_bytes(const CudaContext&, const AttendArgs&, const CudaAttendLimits&,
                               CudaAttendPath) {
  return 0;
}
int64_t attend_workspace_bytes_up_to(const CudaContext&, const AttendArgs&, const CudaAttendBounds&,
                                     CudaAttendPath) {
  return 0;
}
Status attend(const CudaContext&, const AttendArgs&, const CudaAttendLimits&, uint8_t*,
              DeviceCounters*, CudaAttendPath) {
  return no_cuda();
}
struct AttendPlan::Choices {
  CudaAttendLimits limits;
};
AttendPlan::AttendPlan(AttendPlan&&) noexcept = default;
AttendPlan& AttendPlan::operator=(AttendPlan&&) noexcept = default;
AttendPlan::~AttendPlan() = default;
Result<AttendPlan> AttendPlan::make(const CudaContext&, const AttendArgs&, const CudaAttendLimits&,
                                    CudaAttendPath) {
  return no_cuda();
}
Result<const AttendPlan*> AttendPlan::of_thread(const CudaContext&, const AttendArgs&,
                                                const CudaAttendLimits&) {
  return no_cuda();
}
int64_t AttendPlan::workspace_bytes() const {
  return 0;
}
const CudaAttendLimits& AttendPlan::limits() const {
  return choices_->limits;
}
bool AttendPlan::reads_in_place() const {
  return false;
}
Status attend(const CudaContext&, const AttendArgs&, const AttendPlan&, uint8_t*, DeviceCounters*) {
  return no_cuda();
}
Status plan_window(const CudaContext&, const WindowPlanArgs&, DeviceCounters*) {
  return no_cuda();
}
Status forget_window_blocks(const CudaContext&, const WindowState&, std::span<const int64_t>,
                            DeviceCounters*) {
  return no_cuda();
}
Result<DeviceCounters*> cuda::ignored_counters() {
  return no_cuda();
}

}  // namespace kvx::ops
