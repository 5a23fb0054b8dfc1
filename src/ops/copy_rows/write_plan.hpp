// WritePlan: the checked arguments of kvx_write_kv.
#pragma once

#include "ops/copy_rows/views.hpp"

namespace kvx::ops::copy_rows {

struct WritePlan {
  CacheView cache;
  IoView io;
  SlotView slots;
  ScaleView k_scale;
  ScaleView v_scale;

  bool is_on_device() const { return cache.k.memory != MemoryType::kHost; }
};

}  // namespace kvx::ops::copy_rows
