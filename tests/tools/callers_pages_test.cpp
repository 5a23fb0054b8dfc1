// Pages of kvx bench in a caller's orders.
#include "tools/kvx/bench/callers_pages.hpp"

#include <gtest/gtest.h>

#include "format/list.hpp"
#include "format/spec.hpp"

namespace kvx::tool {
namespace {

ops::HeadRun run_of(format::FormatId id) {
  ops::HeadRun run = {0, 8, {}, {}};
  for (ops::SideView* side : {&run.k, &run.v}) {
    side->spec = format::make_spec(id).value();
    side->head_dim = 128;
  }
  return run;
}

TEST(CallersPages, AreNamedByOrderAndBlockSize) {
  EXPECT_EQ(parse_page_layout("pool").value().order, PageOrder::kPool);
  EXPECT_EQ(parse_page_layout("nhd16").value().order, PageOrder::kNhd);
  EXPECT_EQ(parse_page_layout("nhd16").value().block_size, 16);
  EXPECT_EQ(parse_page_layout("hnd64").value().order, PageOrder::kHnd);
  EXPECT_EQ(parse_page_layout("hnd64").value().block_size, 64);
}

TEST(CallersPages, RefuseNamesThatAreNone) {
  for (const char* name : {"", "nhd", "hnd0", "nhd16x", "dhn16", "nhd-1", "hnd99999"}) {
    const auto layout = parse_page_layout(name);
    ASSERT_FALSE(layout.ok()) << name;
    EXPECT_NE(layout.error().message.find(name), std::string::npos);
  }
}

TEST(CallersPages, KeepTokensTogetherInNhdAndHeadsInHnd) {
  for (const PageOrder order : {PageOrder::kNhd, PageOrder::kHnd}) {
    ops::HeadRun run = run_of(format::FormatId::kNvfp4);
    const auto pages = lay_out_pages(cache::host_memory(), order, 3, 16, run);
    ASSERT_TRUE(pages.ok());
    const bool is_nhd = order == PageOrder::kNhd;
    EXPECT_EQ(run.k.codes.block_stride, 16 * 8 * 64);
    EXPECT_EQ(run.k.codes.token_stride, is_nhd ? 8 * 64 : 64);
    EXPECT_EQ(run.k.codes.head_stride, is_nhd ? 64 : 16 * 64);
    EXPECT_EQ(run.v.scales.token_stride, is_nhd ? 8 * 8 : 8);
    EXPECT_EQ(run.v.scales.head_stride, is_nhd ? 8 : 16 * 8);
    EXPECT_EQ(run.v.scales.group_stride, 1);
  }
}

TEST(CallersPages, KeepCodesAndScalesInRegionsThatDoNotMeet) {
  ops::HeadRun run = run_of(format::FormatId::kInt4);
  const auto pages = lay_out_pages(cache::host_memory(), PageOrder::kHnd, 5, 16, run);
  ASSERT_TRUE(pages.ok());
  const int64_t code_bytes = 5 * 16 * 8 * 64;
  EXPECT_GE(run.v.codes.base - run.k.codes.base, code_bytes);
  EXPECT_GE(run.k.scales.base - run.v.codes.base, code_bytes);
  EXPECT_GE(run.v.scales.base - run.k.scales.base, 5 * 16 * 8 * 4);
  // The last scale of the last row is inside.
  uint8_t* last = run.v.scales.at(4, 15, 7) + run.v.scales.group_stride;
  *last = 1;
  EXPECT_EQ(run.v.scales.group_stride, 2);
}

}  // namespace
}  // namespace kvx::tool
