// Which heads two layers store alike, and where they begin.
#include "ops/cuda/common_runs.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/test_layer.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::cuda {
namespace {

TEST(CommonRuns, CutHeadsWhereEitherLayerDoes) {
  const tests::LayerShape shape = {.num_heads = 6};
  tests::TestLayer layer(tests::spec_named("int8"), tests::spec_named("bf16"), shape);
  const std::vector<float> tensor_scales(6, 1.0f);
  layer.k.view.tensor_scales = tensor_scales.data();
  const LayerView whole = layer.view();
  const HeadRun& run = whole.runs.front();
  const auto cut_at = [&](int head) {
    return std::vector<HeadRun>{part_of(run, 0, head), part_of(run, head, 6 - head)};
  };
  const auto from_runs = cut_at(1), to_runs = cut_at(4);
  LayerView from = whole, to = whole;
  from.runs = from_runs;
  to.runs = to_runs;
  std::vector<int> first_heads;
  const Status status = for_each_common_run(from, to, [&](const HeadRun& a, const HeadRun& b) {
    EXPECT_EQ(a.num_heads, b.num_heads);
    for (int i = 0; i < a.num_heads; ++i) {
      const int head = a.first_head + i;
      EXPECT_EQ(a.k.codes.at(1, 2, i), run.k.codes.at(1, 2, head));
      EXPECT_EQ(b.k.scales.at(1, 2, i), run.k.scales.at(1, 2, head));
      EXPECT_EQ(b.v.codes.at(1, 2, i), run.v.codes.at(1, 2, head));
      EXPECT_EQ(a.k.tensor_scales + i, tensor_scales.data() + head);
    }
    EXPECT_EQ(b.v.scales.base, nullptr);
    first_heads.push_back(a.first_head);
    return Status();
  });
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(first_heads, (std::vector<int>{0, 1, 4}));
}

TEST(CommonRuns, StopAtTheFirstError) {
  const tests::LayerShape shape = {.num_heads = 2};
  tests::TestLayer layer(tests::spec_named("int8"), tests::spec_named("int8"), shape);
  const LayerView whole = layer.view();
  const HeadRun& run = whole.runs.front();
  const std::vector<HeadRun> runs = {part_of(run, 0, 1), part_of(run, 1, 1)};
  LayerView cut = whole;
  cut.runs = runs;
  int calls = 0;
  const Status status = for_each_common_run(whole, cut, [&](const HeadRun&, const HeadRun&) {
    ++calls;
    return Status(unsupported("no"));
  });
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace kvx::ops::cuda
