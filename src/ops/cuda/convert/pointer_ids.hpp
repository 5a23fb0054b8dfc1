// pointer_ids: an engine's table of block addresses on a GPU, turned there into block ids.
#pragma once

#include <cstdint>

#include "core/result.hpp"
#include "ops/cuda/context.hpp"
#include "ops/cuda/device_counters.hpp"

namespace kvx::ops {

// Block b begins b * stride bytes behind base.
struct PointerPool {
  const uint8_t* base = nullptr;
  int64_t stride = 1;
};

// Tables and ids lie in the device's memory.
struct PointerTable {
  const uint8_t* const* blocks = nullptr;        // [count]
  const uint8_t* const* scale_blocks = nullptr;  // [count]; null: there is no second pool
  int64_t count = 0;
  PointerPool pool;
  PointerPool scale_pool;
  int64_t num_blocks = 0;
};

// ids: [count]. An address that begins no block, or a scale block of another id than its block,
// becomes -1 and is counted as out of range.
Status pointer_ids(const CudaContext& context, const PointerTable& table, int32_t* ids,
                   DeviceCounters* counters);

}  // namespace kvx::ops
