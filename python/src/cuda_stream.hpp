// CUDA streams as Python's libraries name them.
#pragma once

#include <nanobind/nanobind.h>

#include "device/cuda.hpp"

namespace kvx::python {

// The stream of a number (a cudaStream_t), of torch's and CuPy's stream objects and of any object
// with __cuda_stream__(). Throws CoreError: something else. The default stream is null, also where
// it comes as cudaStreamLegacy, 1.
device::CudaStream stream_of(nanobind::handle stream);

// DLPack's number of a stream, which has 1 for the default one.
int64_t dlpack_stream(device::CudaStream stream);

}  // namespace kvx::python
