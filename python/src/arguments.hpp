// Checks by Python's names of arguments that the core has other names for.
#pragma once

#include "python/src/errors.hpp"

namespace kvx::python {

inline void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw CoreError(invalid_argument("{} is {}; expected {} to {}", name, value, low, high));
}

}  // namespace kvx::python
