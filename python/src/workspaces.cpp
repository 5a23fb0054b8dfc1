// Workspaces only grow. The smaller ones before them stay, since graphs may know their addresses;
// each is at least twice as large as the one before, so all of them together take twice the last.
#include "python/src/workspaces.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "device/cuda_async.hpp"
#include "ops/attend/attend_cuda.hpp"

namespace kvx::python {
namespace {

constexpr int64_t kLeastBytes = int64_t{1} << 20;

// The process's, until it ends.
struct KeptWorkspace {
  uint8_t* data = nullptr;
  int64_t bytes = 0;

  Status grow(int device, int64_t needed) {
    if (needed <= bytes) return {};
    const int64_t grown = std::max({needed, 2 * bytes, kLeastBytes});
    KVX_ASSIGN_OR_RETURN(data, device::cuda_allocate(device, grown));
    bytes = grown;
    return {};
  }
};

struct KeptWorkspaces {
  std::mutex mutex;
  std::map<std::pair<int, device::CudaStream>, KeptWorkspace> of_streams;
  std::map<int, KeptWorkspace> of_graphs;  // of a device
};

KeptWorkspaces& kept_workspaces() {
  static auto& kept = *new KeptWorkspaces;  // freed by CUDA when the process ends
  return kept;
}

Result<uint8_t*> given_workspace(int64_t bytes, const GivenWorkspace& given) {
  if (given.bytes < bytes) {
    return invalid_argument(
        "workspace has {} bytes; this call needs {} (workspace_bytes() says what is enough for a "
        "range of calls)",
        given.bytes, bytes);
  }
  if (reinterpret_cast<uintptr_t>(given.data) % ops::kCudaWorkspaceAlignment != 0) {
    return invalid_argument("workspace begins on {} bytes; expected a multiple of {}",
                            reinterpret_cast<uintptr_t>(given.data) % ops::kCudaWorkspaceAlignment,
                            ops::kCudaWorkspaceAlignment);
  }
  return given.data;
}

}  // namespace

Result<uint8_t*> workspace_of(const ops::CudaContext& context, int64_t bytes,
                              const GivenWorkspace& given) {
  if (bytes == 0) return static_cast<uint8_t*>(nullptr);
  if (given.data != nullptr) return given_workspace(bytes, given);
  KVX_ASSIGN_OR_RETURN(const bool is_capturing, device::cuda_is_capturing(context.stream));
  KeptWorkspaces& kept = kept_workspaces();
  const std::lock_guard lock(kept.mutex);
  KeptWorkspace& of_graphs = kept.of_graphs[context.device.index];
  if (is_capturing) {
    if (bytes <= of_graphs.bytes) return of_graphs.data;
    return unsupported(
        "this call needs a workspace of {} bytes, and the process keeps {} for graphs of cuda:{}: "
        "nothing can be allocated while a stream captures; make the call once before the capture, "
        "or pass workspace=, a uint8 tensor of workspace_bytes() bytes",
        bytes, of_graphs.bytes, context.device.index);
  }
  KeptWorkspace& of_stream = kept.of_streams[{context.device.index, context.stream}];
  KVX_RETURN_IF_ERROR(of_graphs.grow(context.device.index, bytes));
  KVX_RETURN_IF_ERROR(of_stream.grow(context.device.index, bytes));
  return of_stream.data;
}

}  // namespace kvx::python
