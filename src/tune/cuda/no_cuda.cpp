// statistics_kernels.hpp in a build without CUDA. Nothing reaches it: DeviceStatistics finds no
// device there.
#include "tune/cuda/statistics_kernels.hpp"

namespace kvx::tune::gpu {
namespace {

Error no_cuda() {
  return unsupported("this build of kvx has no CUDA (KVX_CUDA was OFF, or nvcc was not found)");
}

}  // namespace

Status launch_make_turns(device::CudaStream, const Turns&, int64_t, int, float*) {
  return no_cuda();
}
Status launch_count_channels(device::CudaStream, const CountedRows&, const ChannelSums&,
                             const Turns&) {
  return no_cuda();
}
Status launch_add_moments(device::CudaStream, const CountedRows&, int, double*) {
  return no_cuda();
}

}  // namespace kvx::tune::gpu
