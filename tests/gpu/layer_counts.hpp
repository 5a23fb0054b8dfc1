// LayerCounts: what the heads of a TestLayer could not store as it came.
#pragma once

#include "tests/gpu/gpu.hpp"
#include "tests/support/test_layer.hpp"

namespace kvx::tests {

struct LayerCounts {
  // The layer's views point here from now on.
  LayerCounts(TestLayer& layer, int num_heads)
      : k(static_cast<size_t>(num_heads)), v(static_cast<size_t>(num_heads)) {
    layer.k.view.counts = k.data();
    layer.v.view.counts = v.data();
  }
  LayerCounts(const LayerCounts&) = delete;

  // Of a layer that a MirroredLayer was made of.
  void fetch(const Mirror& mirror) {
    mirror.fetch(k);
    mirror.fetch(v);
  }
  int64_t saturated() const {
    int64_t sum = 0;
    for (const auto* heads : {&k, &v}) {
      for (const ops::HeadCounts& head : *heads) sum += head.saturated;
    }
    return sum;
  }

  std::vector<ops::HeadCounts> k, v;
};

inline void expect_same_counts(const LayerCounts& expected, const LayerCounts& found) {
  for (const bool is_k : {true, false}) {
    const auto& a = is_k ? expected.k : expected.v;
    const auto& b = is_k ? found.k : found.v;
    for (size_t head = 0; head < a.size(); ++head) {
      EXPECT_EQ(a[head].saturated, b[head].saturated) << (is_k ? "K" : "V") << " of head " << head;
      EXPECT_EQ(a[head].nonfinite, b[head].nonfinite) << (is_k ? "K" : "V") << " of head " << head;
    }
  }
}

}  // namespace kvx::tests
