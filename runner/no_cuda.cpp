// elementwise_cuda.hpp in a build without CUDA. Nothing reaches it: GpuProducts, which calls these,
// finds no device there.
#include "runner/elementwise_cuda.hpp"

namespace kvx::runner::gpu {
namespace {

Error no_cuda() {
  return unsupported("this build of kvx has no CUDA (KVX_CUDA was OFF, or nvcc was not found)");
}

}  // namespace

Status launch_add_norm(device::CudaStream, const NormArgs&, int, int, DType) {
  return no_cuda();
}
Status launch_rotate(device::CudaStream, const RotateArgs&, int) {
  return no_cuda();
}
Status launch_silu_multiply(device::CudaStream, const ProductRows&, int, int, DType, void*) {
  return no_cuda();
}
Status launch_round(device::CudaStream, const float*, int64_t, DType, void*) {
  return no_cuda();
}

}  // namespace kvx::runner::gpu
