// Weights of tiny models by a rule that the scripts of their golden files have too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvx::tests {

// Multiples of 2^-10 in [-1/4, 1/4).
inline std::vector<float> weights(const std::string& name, uint64_t count, float offset = 0) {
  uint32_t state = 2166136261u;
  for (const char c : name) state = (state ^ static_cast<uint8_t>(c)) * 16777619u;
  std::vector<float> out;
  for (uint64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    out.push_back(offset + static_cast<float>(static_cast<int>((state >> 16) % 512) - 256) / 1024);
  }
  return out;
}

}  // namespace kvx::tests
