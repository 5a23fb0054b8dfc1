// Timing: how long a call takes, for kvx bench.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace kvx::tool {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Seconds of each call, after one that warms up; at least three calls, more while they take less
// than min_seconds together.
template <class Call>
std::vector<double> time_calls(double min_seconds, const Call& call) {
  constexpr size_t kMinCalls = 3;
  call();
  std::vector<double> seconds;
  double total = 0;
  while (seconds.size() < kMinCalls || total < min_seconds) {
    const auto start = std::chrono::steady_clock::now();
    call();
    seconds.push_back(seconds_since(start));
    total += seconds.back();
  }
  return seconds;
}

// Requires: not empty.
inline double median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

}  // namespace kvx::tool
