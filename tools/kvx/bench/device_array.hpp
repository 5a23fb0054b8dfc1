// Device memory with what a host vector holds, and numbers to put there.
#pragma once

#include <random>
#include <vector>

#include "cache/pool/memory.hpp"
#include "core/float16.hpp"
#include "device/cuda.hpp"

namespace kvx::tool {

class DeviceArray {
 public:
  template <class T>
  static Result<DeviceArray> of(cache::Memory& memory, const std::vector<T>& host) {
    const int64_t bytes = std::ssize(host) * static_cast<int64_t>(sizeof(T));
    DeviceArray array;
    KVX_ASSIGN_OR_RETURN(array.region_, memory.allocate(bytes, "an array of kvx bench"));
    KVX_RETURN_IF_ERROR(device::cuda_copy(array.region_.data(), host.data(), bytes));
    return array;
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(region_.data());
  }

 private:
  cache::Region region_;
};

inline std::vector<uint16_t> random_bf16(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bits(n);
  for (uint16_t& x : bits) x = f32_to_bf16(normal(random));
  return bits;
}

// Normally distributed numbers, in either type of 16 bits.
inline std::vector<uint16_t> random_numbers(DType type, int64_t n, unsigned seed) {
  std::vector<uint16_t> bits = random_bf16(n, seed);
  if (type == DType::kBF16) return bits;
  for (uint16_t& x : bits) x = f32_to_f16(bf16_to_f32(x));
  return bits;
}

}  // namespace kvx::tool
