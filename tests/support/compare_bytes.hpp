// same_bytes compares two runs of bytes and says where, in the test's own words, they first differ.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace kvx::tests {

using Bytes = std::span<const uint8_t>;

// describe(i) says what byte i belongs to: "token 3, head 1, group 2".
inline testing::AssertionResult same_bytes(
    Bytes expected, Bytes actual,
    const std::function<std::string(size_t)>& describe = [](size_t) { return std::string(); }) {
  if (expected.size() != actual.size()) {
    return testing::AssertionFailure()
           << fmt::format("{} bytes expected, {} bytes found", expected.size(), actual.size());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == actual[i]) continue;
    return testing::AssertionFailure() << fmt::format("byte {} ({}): expected {:02x}, found {:02x}",
                                                      i, describe(i), expected[i], actual[i]);
  }
  return testing::AssertionSuccess();
}

}  // namespace kvx::tests
