// find_prefill_kernel: from formats to the compiled instance; and its launch.
#include <cuda_runtime_api.h>

#include "ops/attend/cuda/common/params.hpp"
#include "ops/attend/cuda/formats.hpp"
#include "ops/attend/cuda/prefill/launch.hpp"

namespace kvx::ops::cuda {
namespace {

using format::FormatId;

ScalePath scale_path_of(const PrefillSide& side) {
  return tensor_core_format(side.id).scale_path;
}
bool has_groups(const PrefillSide& side) {
  return scale_path_of(side) == ScalePath::kGroups64;
}
// Whether the tile can hold the numbers themselves, as f16.
bool goes_into_operand(const PrefillSide& side, bool may_round) {
  switch (scale_path_of(side)) {
    case ScalePath::kNone:
    case ScalePath::kRowF16:
      return false;
    case ScalePath::kRow:
      return side.has_shared_scale;
    case ScalePath::kGroups64:
    case ScalePath::kAffine:
      return may_round;
    case ScalePath::kOperand:
      return true;
  }
  return false;
}
// Whether the tile can hold codes whose scales multiply scores and weights.
bool goes_onto_scores(const PrefillSide& side) {
  switch (scale_path_of(side)) {
    case ScalePath::kNone:
    case ScalePath::kOperand:
    case ScalePath::kRowF16:
      return false;
    case ScalePath::kRow:
    case ScalePath::kGroups64:
    case ScalePath::kAffine:
      return true;
  }
  return false;
}

template <PrefillEngine Engine, class Mma, PrefillScales Scales>
PrefillKernel instance(const PrefillDims& dims) {
  const bool is_long = !dims.fit(128, 128);
  if constexpr (Engine == PrefillEngine::kMmaSync) {
    return is_long ? PrefillKernel{} : mma_sync_instance<Mma, Scales>(dims);
  } else if constexpr (Scales == PrefillScales::kOnParts) {
    return is_long ? PrefillKernel{} : wgmma_instance<Mma, Scales>(dims);
  } else {
    return is_long ? long_wgmma_instance<Mma, Scales>(dims) : wgmma_instance<Mma, Scales>(dims);
  }
}

template <PrefillEngine Engine>
PrefillKernel find_for(const PrefillCall& call) {
  using enum PrefillScales;
  const auto& [k, v, dims, has_full_precision_window, may_round] = call;
  if (k.id == FormatId::kBF16 &&
      v.id == FormatId::kBF16) {  // full-precision window are rows like others
    return instance<Engine, MmaBf16, kNone>(dims);
  }
  if (k.id == FormatId::kF16 && v.id == FormatId::kF16 && !has_full_precision_window) {
    return instance<Engine, MmaF16, kNone>(dims);
  }
  if (goes_into_operand(k, may_round) && goes_into_operand(v, may_round)) {
    return has_full_precision_window ? instance<Engine, MmaF16, kOnOperandBesideFullPrecision>(dims)
                                     : instance<Engine, MmaF16, kOnOperand>(dims);
  }
  if (goes_onto_scores(k) && goes_onto_scores(v)) {
    const bool has_parts = !dims.fit(64, 64) && (has_groups(k) || has_groups(v));
    return has_parts ? instance<Engine, MmaF16, kOnParts>(dims)
                     : instance<Engine, MmaF16, kOnScores>(dims);
  }
  return {};
}

}  // namespace

PrefillKernel find_prefill_kernel(PrefillEngine engine, const PrefillCall& call) {
  return engine == PrefillEngine::kWgmma ? find_for<PrefillEngine::kWgmma>(call)
                                         : find_for<PrefillEngine::kMmaSync>(call);
}

cudaError_t launch_attend_prefill(const PrefillKernel& kernel, const LaunchGrid& grid,
                                  const PrefillParams& params, cudaStream_t stream) {
  const cudaError_t set = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
  if (set != cudaSuccess) return set;
  void* arguments[] = {const_cast<PrefillParams*>(&params)};
  return cudaLaunchKernel(kernel.function, dim3(grid.x, grid.y, grid.z), dim3(kernel.threads),
                          arguments, kernel.shared_bytes, stream);
}

}  // namespace kvx::ops::cuda
