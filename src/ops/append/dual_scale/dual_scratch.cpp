// One vector a thread.
#include "ops/append/dual_scale/dual_scratch.hpp"

#include <cstddef>
#include <vector>

namespace kvx::ops::cpu {

float* dual_scratch(int64_t num_floats) {
  thread_local std::vector<float> scratch;
  if (scratch.size() < static_cast<size_t>(num_floats)) {
    scratch.resize(static_cast<size_t>(num_floats));
  };
  return scratch.data();
}

}  // namespace kvx::ops::cpu
