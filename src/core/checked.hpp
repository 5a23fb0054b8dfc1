// Checked 64-bit size arithmetic: a product of dimensions either fits or is an error.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

namespace kvx {

// A non-negative size that remembers whether any step overflowed.
class CheckedSize {
 public:
  constexpr CheckedSize(int64_t value) : value_(value), ok_(value >= 0) {}  // NOLINT: implicit

  constexpr CheckedSize operator*(CheckedSize other) const {
    CheckedSize result = *this;
    result.ok_ = ok_ && other.ok_ && !__builtin_mul_overflow(value_, other.value_, &result.value_);
    return result;
  }
  constexpr CheckedSize operator+(CheckedSize other) const {
    CheckedSize result = *this;
    result.ok_ = ok_ && other.ok_ && !__builtin_add_overflow(value_, other.value_, &result.value_);
    return result;
  }

  // Empty when a factor was negative or a step overflowed int64.
  constexpr std::optional<int64_t> get() const {
    return ok_ ? std::optional<int64_t>(value_) : std::nullopt;
  }

 private:
  int64_t value_;
  bool ok_;
};

// Requires: a >= 0, b > 0.
template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Requires: a >= 0, b > 0.
template <class T>
constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

// floor(a * b / c) without overflow on the way; a result that does not fit is the largest int64.
// Requires: a >= 0, b >= 0, c > 0.
constexpr int64_t mul_div(int64_t a, int64_t b, int64_t c) {
  __extension__ using Int128 = __int128;
  constexpr Int128 kMost = std::numeric_limits<int64_t>::max();
  const Int128 result = Int128{a} * b / c;
  return static_cast<int64_t>(result < kMost ? result : kMost);
}

}  // namespace kvx
