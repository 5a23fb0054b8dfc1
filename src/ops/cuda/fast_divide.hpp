// FastDivide: division by a number that is fixed on the host, without the device's division, of
// which a 64-bit one takes a hundred instructions.
#pragma once

#include <bit>
#include <cstdint>

#include "core/host_device.hpp"

namespace kvx::ops::cuda {

// quotient(n) = n / divisor for n < 2^31. With 2^shift the power of two at or above the divisor,
// (2^32 + multiplier) / 2^(32 + shift) exceeds 1 / divisor by less than any such n notices
// (Granlund and Montgomery, 1994).
struct FastDivide {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  int shift = 0;

  FastDivide() = default;
  // Requires: 1 <= by < 2^31.
  explicit FastDivide(int by) : divisor(static_cast<uint32_t>(by)) {
    shift = std::bit_width(divisor - 1);
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    multiplier = static_cast<uint32_t>((excess << 32) / divisor + 1);
  }

  KVX_INLINE uint32_t quotient(uint32_t n) const {
    const auto high = static_cast<uint32_t>((uint64_t{n} * multiplier) >> 32);
    return (high + n) >> shift;
  }

  // A number like others, by which kernels divide: n / by and n % by. Requires: n >= 0.
  KVX_INLINE operator int() const { return static_cast<int>(divisor); }
  friend KVX_INLINE int operator/(int n, const FastDivide& by) {
    return static_cast<int>(by.quotient(static_cast<uint32_t>(n)));
  }
  friend KVX_INLINE int operator%(int n, const FastDivide& by) {
    return n - n / by * static_cast<int>(by.divisor);
  }
};

// The same for 64-bit numbers, which are mostly below 2^31.
struct FastDivide64 {
  FastDivide below_2_to_31;
  int64_t divisor = 1;

  FastDivide64() = default;
  // Requires: by >= 1.
  explicit FastDivide64(int64_t by)
      : below_2_to_31(static_cast<int>(by < INT32_MAX ? by : INT32_MAX)), divisor(by) {}

  KVX_INLINE int64_t quotient(int64_t n) const {
    if (n >= 0 && n < INT32_MAX) return below_2_to_31.quotient(static_cast<uint32_t>(n));
    return n / divisor;
  }
};

}  // namespace kvx::ops::cuda
