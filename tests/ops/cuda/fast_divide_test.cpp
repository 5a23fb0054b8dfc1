// FastDivide against the machine's division.
#include "ops/cuda/fast_divide.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace kvx::ops::cuda {
namespace {

constexpr uint32_t kMost = 0x7FFFFFFF;

void expect_quotients(int divisor) {
  const FastDivide by(divisor);
  const auto d = static_cast<uint32_t>(divisor);
  // Errors would show beside a multiple of the divisor, the large ones first.
  for (const uint32_t multiple : {d, kMost / d * d, kMost / d / 2 * d}) {
    for (const uint32_t n : {std::max(multiple, 1u) - 1, multiple, std::min(multiple + 1, kMost)}) {
      ASSERT_EQ(by.quotient(n), n / d) << n << " / " << d;
    }
  }
  const auto most = static_cast<int>(kMost);
  ASSERT_EQ(most / by, most / divisor);
  ASSERT_EQ(most % by, most % divisor);
  ASSERT_EQ(by.quotient(0), 0u);
  ASSERT_EQ(by.quotient(kMost), kMost / d);
}

TEST(FastDivide, IsDivisionForEveryNumberBelow2To31) {
  for (int divisor = 1; divisor <= 4096; ++divisor) expect_quotients(divisor);
  for (int bit = 1; bit < 31; ++bit) {
    for (const int near : {-1, 0, 1}) expect_quotients((1 << bit) + near);
  }
  expect_quotients(static_cast<int>(kMost));
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const auto divisor = static_cast<int>(random() % kMost + 1);
    expect_quotients(divisor);
    const uint32_t n = static_cast<uint32_t>(random()) & kMost;
    ASSERT_EQ(FastDivide(divisor).quotient(n), n / static_cast<uint32_t>(divisor));
  }
}

TEST(FastDivide, IsDivisionOnBothSidesOf2To31) {
  const auto expect_quotients_64 = [](int64_t divisor) {
    const FastDivide64 by(divisor);
    constexpr int64_t kBeyond = int64_t{kMost} + 3;
    for (const int64_t n :
         {int64_t{0}, divisor - 1, divisor, divisor + 1, kMost - int64_t{1}, int64_t{kMost},
          kMost + int64_t{1}, kBeyond / divisor * divisor, int64_t{1} << 40}) {
      ASSERT_EQ(by.quotient(n), n / divisor) << n << " / " << divisor;
    }
  };
  for (int64_t divisor = 1; divisor <= 4096; ++divisor) expect_quotients_64(divisor);
  for (int bit = 12; bit < 40; ++bit) {
    for (const int near : {-1, 0, 1}) expect_quotients_64((int64_t{1} << bit) + near);
  }
}

}  // namespace
}  // namespace kvx::ops::cuda
