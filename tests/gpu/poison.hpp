// What an earlier launch may have left, made as bad as it can be: a kernel that reads memory which
// it did not write then shows it.
#pragma once

#include "ops/cuda/context.hpp"

namespace kvx::tests {

// Fills the shared memory of every multiprocessor with NaNs, on the context's stream.
#if KVX_HAS_CUDA
void poison_shared_memory(const ops::CudaContext& context);
#else
inline void poison_shared_memory(const ops::CudaContext&) {}
#endif

}  // namespace kvx::tests
