// The v1 calls' rows on a GPU in a build without CUDA. These functions cannot be reached: no
// descriptor with a GPU's memory passes the checks of the API boundary.
#include "ops/copy_rows/copy_rows_cuda.hpp"

namespace kvx::ops::copy_rows {
namespace {

Error no_cuda() {
  return unsupported("this build of kvx has no CUDA (KVX_CUDA was OFF, or nvcc was not found)");
}

}  // namespace

Status write_on_device(const CudaContext&, const WritePlan&) {
  return no_cuda();
}
Status gather_on_device(const CudaContext&, const GatherPlan&) {
  return no_cuda();
}

}  // namespace kvx::ops::copy_rows
