// A number that no other process, machine or run is likely to have.
#pragma once

#include <cstdint>
#include <random>

namespace kvx {

inline uint64_t random_id() {
  std::random_device random;
  const uint64_t high = random();
  return high << 32 | random();
}

}  // namespace kvx
