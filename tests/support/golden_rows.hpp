// Walks the golden files of rows: every test of append and gather, on the CPU or on a device, sees
// the same cases, and none of them fewer than the oracle wrote.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "tests/support/golden.hpp"

namespace kvx::tests {

// check(row, name of its format), for the rows of every format.
template <class Check>
void for_each_golden_row(Check check) {
  int cases = 0;
  for (const format::Facts* facts : format::kRowFacts) {
    const std::string name(facts->name);
    const Json golden = read_golden("rows_" + name);
    for (const Json& row : golden["cases"]) {
      check(row, name);
      ++cases;
    }
  }
  EXPECT_GE(cases, 1172);
}

// Likewise for the rows whose scales are chosen by squared error.
template <class Check>
void for_each_golden_choice(Check check) {
  int cases = 0;
  const Json golden = read_golden("search");
  for (const Json& row : golden["cases"]) {
    check(row, row["format"].get<std::string>());
    ++cases;
  }
  EXPECT_GE(cases, 239);
}

// Likewise for rows rounded with error feedback: check(row, name of its format, the weights
// [head_dim, head_dim]).
template <class Check>
void for_each_golden_feedback(Check check) {
  int cases = 0;
  const Json golden = read_golden("feedback");
  for (const Json& row : golden["cases"]) {
    const int n = row["head_dim"];
    std::vector<float> weights(static_cast<size_t>(n) * n);
    for (const Json& of_dim : golden["weights"]) {
      if (of_dim["head_dim"] != n) continue;
      const std::vector<float> above = floats_of_hex(of_dim["weights"]);
      auto next = above.begin();
      for (int i = 0; i < n; ++i) {
        for (int j = i + 1; j < n; ++j) weights.at(static_cast<size_t>(i) * n + j) = *next++;
      }
    }
    check(row, row["format"].get<std::string>(), weights);
    ++cases;
  }
  EXPECT_GE(cases, 162);
}

// Likewise for transforms: check(row, the terms of its head_dim, the file).
template <class Check>
void for_each_golden_transform(Check check) {
  int cases = 0;
  const Json golden = read_golden("transforms");
  for (const Json& row : golden["cases"]) {
    SCOPED_TRACE(row.dump().substr(0, 120));
    const auto terms =
        std::find_if(golden["terms"].begin(), golden["terms"].end(),
                     [&](const Json& t) { return t["head_dim"] == row["head_dim"]; });
    ASSERT_NE(terms, golden["terms"].end());
    check(row, *terms, golden);
    ++cases;
  }
  EXPECT_GE(cases, 80);
}

// What a failing case is called.
inline std::string title_of_row(const Json& row, const std::string& format_name,
                                const format::FormatSpec& spec) {
  return fmt::format("{} row {} head_dim {} group {} scale {} {} {}", format_name,
                     row["row"].get<std::string>(), row["head_dim"].get<int>(), spec.group_size,
                     name_of(spec.scale_type), name_of(spec.scale_source),
                     name_of(spec.scale_choice));
}

inline float tensor_scale_of(const Json& row) {
  return row.contains("tensor_scale") ? float_of_hex(row["tensor_scale"]) : 1.0f;
}

// NaNs are compared as NaNs, everything else bit for bit.
inline testing::AssertionResult same_floats(const std::vector<float>& expected,
                                            const std::vector<float>& actual) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
    if (std::bit_cast<uint32_t>(expected[i]) == std::bit_cast<uint32_t>(actual[i])) continue;
    return testing::AssertionFailure()
           << "element " << i << ": expected " << expected[i] << ", found " << actual[i];
  }
  return testing::AssertionSuccess();
}

}  // namespace kvx::tests
