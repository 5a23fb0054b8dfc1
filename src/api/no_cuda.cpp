// The door's own GPU code in a build without CUDA. It cannot be reached: no descriptor with a
// GPU's memory passes its checks (device/no_cuda.cpp).
#include "api/device_counters.hpp"
#include "api/v1/device_rows.hpp"

namespace kvx::boundary {
namespace {

Error no_cuda() {
  return unsupported("this build of kvx has no CUDA (KVX_CUDA was OFF, or nvcc was not found)");
}

}  // namespace

Status write_on_device(const ops::CudaContext&, const WritePlan&) {
  return no_cuda();
}
Status gather_on_device(const ops::CudaContext&, const GatherPlan&) {
  return no_cuda();
}
Result<ops::DeviceCounters*> ignored_counters() {
  return no_cuda();
}

}  // namespace kvx::boundary
