// transcode on a GPU: tokens from slots of one layer to slots of another, decoded with the first
// one's transform undone, transformed and encoded as the second one has it.
#pragma once

#include "ops/cache_view.hpp"
#include "ops/cuda/context.hpp"
#include "ops/transform.hpp"

namespace kvx::ops {

// The layers have the same heads and head_dims and lie in different memory; all else may differ.
// Neither transform has a block_offset. Transforms are of the first segment of K's rows and of V.
struct TranscodeArgs {
  LayerView from;
  LayerView to;
  LayerTransform from_transform;
  LayerTransform to_transform;
  const int64_t* from_slots = nullptr;  // [num_tokens], in device memory
  const int64_t* to_slots = nullptr;    // [num_tokens]; a negative slot in either: not copied
  int64_t num_tokens = 0;
};

// As gather to f32 and append of what it found, byte for byte, on the context's stream and without
// the memory between. A token with a slot out of range is skipped and counted, once for each
// segment of K's rows and once for V. Under page-shared scales a run of consecutive slots is taken
// whole. INVALID_ARGUMENT: more rows than one call can take. UNSUPPORTED: K's rows are cut into
// other segments in the two layers.
Status transcode(const CudaContext& context, const TranscodeArgs& args, DeviceCounters* counters);

}  // namespace kvx::ops
