// Launches that begin before the stream's earlier work has ended (programmatic dependent launch):
// a CTA is there when its turn comes, which is worth about a microsecond a call. Only where the
// kernel's own code can wait for that turn (earlier_work.cuh): from compute capability 9.0 on.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device/cuda_error.hpp"
#include "ops/cuda/context.hpp"
#include "ops/cuda/earlier_work.cuh"

namespace kvx::ops::cuda {

struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes = 0;
  int ctas_of_cluster = 1;  // neighbours in y
};

// Requires: the kernel begins with wait_for_earlier_launches() or wait_for_earlier_work(), and
// takes *params.
inline cudaError_t launch_overlapping(const CudaContext& context, const void* kernel,
                                      const LaunchShape& shape, const void* params) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {1, static_cast<unsigned>(shape.ctas_of_cluster), 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = attributes;
  const bool has_attributes = device::cuda_code_version(context.device, kernel) >= 90;
  config.numAttrs = !has_attributes ? 0 : shape.ctas_of_cluster == 1 ? 1 : 2;
  void* arguments[] = {const_cast<void*>(params)};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

template <class Params>
Status launch_overlapping(const CudaContext& context, const char* name, void (*kernel)(Params),
                          const LaunchShape& shape, const std::type_identity_t<Params>& params) {
  return device::cuda_status(
      launch_overlapping(context, reinterpret_cast<const void*>(kernel), shape, &params), name);
}

}  // namespace kvx::ops::cuda
