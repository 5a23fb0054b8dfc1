// copy_blocks on a GPU.
#pragma once

#include "ops/copy_blocks/copy_blocks.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

// Copies in device memory: a list, or arrays of their blocks and (null: whole blocks) tokens.
struct CudaBlockCopies {
  int64_t count = 0;
  const BlockCopy* list = nullptr;
  const int64_t* from_blocks = nullptr;  // [count]
  const int64_t* to_blocks = nullptr;
  const int32_t* num_tokens = nullptr;
};

// As copy_blocks on the CPU, on the context's stream, all pairs in one launch a run of heads that
// both sides have; two where K alone or V alone makes page-shared scales. Rows of one call are
// copied side by side: a block that is one copy's source must not be another's target. Copies out
// of range are skipped and counted. INVALID_ARGUMENT, nothing written: geometries that differ.
Status copy_blocks(const CudaContext& context, const LayerView& from, const LayerView& to,
                   const CudaBlockCopies& copies, DeviceCounters* counters);
inline Status copy_blocks(const CudaContext& context, const LayerView& from, const LayerView& to,
                          const BlockCopy* copies, int64_t num_copies, DeviceCounters* counters) {
  return copy_blocks(context, from, to, {.count = num_copies, .list = copies}, counters);
}

}  // namespace kvx::ops
