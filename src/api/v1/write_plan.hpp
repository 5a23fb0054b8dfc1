// A write, checked.
#pragma once

#include "api/v1/views.hpp"

namespace kvx::boundary {

struct WritePlan {
  CacheView cache;
  IoView io;
  SlotView slots;
  ScaleView k_scale;
  ScaleView v_scale;

  bool is_on_device() const { return cache.k.memory != MemoryKind::kHost; }
};

}  // namespace kvx::boundary
