// What the model-based tests share: how many operations, and which.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>

#include "tests/support/sanitized.hpp"

namespace kvx::cache {

// KVX_TEST_FULL=1 asks for the long run, 0.1 for a tenth of it.
inline int64_t num_operations(int64_t usual, int64_t full) {
  if (tests::kIsSanitized) usual = (usual + 3) / 4;
  const char* wanted = std::getenv("KVX_TEST_FULL");
  const double share = wanted ? std::atof(wanted) : 0;
  return std::max(usual, static_cast<int64_t>(share * static_cast<double>(full)));
}

// The same history for the same seed on every machine (the standard's distributions are not).
class RandomHistory {
 public:
  explicit RandomHistory(uint64_t seed) : engine_(seed) {}

  // In [low, high].
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace kvx::cache
