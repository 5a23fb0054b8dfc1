// A write, checked.
#pragma once

#include "abi/views.hpp"

namespace kvx::abi {

struct WritePlan {
  CacheView cache;
  IoView io;
  SlotView slots;
  ScaleView k_scale;
  ScaleView v_scale;

  bool is_on_device() const { return cache.k.memory != MemoryKind::kHost; }
};

}  // namespace kvx::abi
