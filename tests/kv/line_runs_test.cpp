// join_lines: what the runs copy is what the copies were, and neighbours are one run.
#include "kv/verbs/line_runs.hpp"

#include <gtest/gtest.h>

#include <random>

namespace kvx::kv {
namespace {

constexpr int64_t kPageBytes = 16;
constexpr int64_t kBlockBytes = 48;

struct Pages {
  std::vector<uint8_t> blocks = std::vector<uint8_t>(64 * kBlockBytes);
  std::vector<uint8_t> staging = std::vector<uint8_t>(64 * kPageBytes);

  std::vector<BytesCopy> copies_of(const std::vector<int>& ids, int64_t bytes = kPageBytes) {
    std::vector<BytesCopy> copies;
    uint8_t* to = staging.data();
    for (const int id : ids) {
      copies.push_back({to, blocks.data() + id * kBlockBytes + 8, bytes});
      to += bytes;
    }
    return copies;
  }
};

std::vector<BytesCopy> copies_in(const std::vector<LineRun>& runs) {
  std::vector<BytesCopy> copies;
  for (const LineRun& run : runs) {
    for_each_line(run, [&copies](const BytesCopy& one) { copies.push_back(one); });
  }
  return copies;
}

void expect_the_same(const std::vector<BytesCopy>& found, const std::vector<BytesCopy>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found[i].to, expected[i].to) << "copy " << i;
    EXPECT_EQ(found[i].from, expected[i].from) << "copy " << i;
    EXPECT_EQ(found[i].bytes, expected[i].bytes) << "copy " << i;
  }
}

TEST(LineRuns, NeighbouringBlocksAreOneRun) {
  Pages pages;
  const auto copies = pages.copies_of({3, 4, 5, 6});
  const auto runs = join_lines(copies);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].num_lines, 4);
  EXPECT_EQ(runs[0].to_stride, kPageBytes);
  EXPECT_EQ(runs[0].from_stride, kBlockBytes);
  expect_the_same(copies_in(runs), copies);
}

TEST(LineRuns, BlocksThatGoBackAndPagesOfAnotherSizeBeginAnew) {
  Pages pages;
  auto copies = pages.copies_of({9, 8, 7});
  EXPECT_EQ(join_lines(copies).size(), 3u) << "CUDA takes no negative stride";
  copies = pages.copies_of({1, 1, 1});
  EXPECT_EQ(join_lines(copies).size(), 3u) << "nor one shorter than a line";
  copies = pages.copies_of({1, 2, 3});
  copies.back().bytes = 4;
  const auto runs = join_lines(copies);
  ASSERT_EQ(runs.size(), 2u);
  expect_the_same(copies_in(runs), copies);
  EXPECT_TRUE(join_lines({}).empty());
}

TEST(LineRuns, CopyWhatTheCopiesDid) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    Pages pages;
    std::vector<int> ids;
    for (int i = 0; i < 24; ++i) {
      const bool goes_on = !ids.empty() && ids.back() < 63 && random() % 3 != 0;
      ids.push_back(goes_on ? ids.back() + 1 : static_cast<int>(random() % 64));
    }
    const auto copies = pages.copies_of(ids);
    const auto runs = join_lines(copies);
    expect_the_same(copies_in(runs), copies);
    for (const LineRun& run : runs) {
      if (run.num_lines == 1) continue;
      EXPECT_GE(run.to_stride, kPageBytes);
      EXPECT_GE(run.from_stride, kPageBytes);
    }
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace kvx::kv
