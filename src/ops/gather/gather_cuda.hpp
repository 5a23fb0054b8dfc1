// gather on a GPU.
#pragma once

#include "ops/cuda/context.hpp"
#include "ops/gather/gather.hpp"

namespace kvx::ops {

// Ranges in device memory: a list, or four arrays, or neither: range i is the whole of sequence i,
// one after the other in the output, and seq_lens has their lengths.
struct CudaGatherRanges {
  int64_t count = 0;
  const GatherRange* list = nullptr;
  const int32_t* sequences = nullptr;  // [count], and so are the others
  const int64_t* first_tokens = nullptr;
  const int64_t* num_tokens = nullptr;
  const int64_t* first_rows = nullptr;
  const int32_t* seq_lens = nullptr;  // [num_sequences]; a range beyond its sequence is skipped
};

// As gather on the CPU, on the context's stream. max_tokens: of any range. Ranges, and tokens of
// blocks, that are out of range are skipped and counted. args.ranges is not looked at.
Status gather(const CudaContext& context, const GatherArgs& args, const CudaGatherRanges& ranges,
              int64_t max_tokens, DeviceCounters* counters);
// With args.ranges, which is in device memory.
Status gather(const CudaContext& context, const GatherArgs& args, int64_t max_tokens,
              DeviceCounters* counters);

}  // namespace kvx::ops
