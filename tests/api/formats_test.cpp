// kvx_format_info, opaque pages, and the growth rules of the structs that 1.2 added.
#include <gtest/gtest.h>

#include <string>

#include "format/list.hpp"
#include "format/spec.hpp"
#include "tests/api/caller_layer.hpp"

namespace kvx::api_test {
namespace {

TEST(FormatInfo, TellsWhatTheFactsSayForEveryFormat) {
  for (uint32_t number = 1; number <= format::kNumFormats; ++number) {
    const format::Facts& facts = *format::kAllFacts[number - 1];
    SCOPED_TRACE(facts.name);
    const kvx_format_spec_t spec = format_spec(static_cast<kvx_format_t>(number));
    const format::FormatSpec spec_of_format = format::make_spec(facts).value();
    auto info = sized<kvx_format_info_t>();
    ASSERT_EQ(kvx_format_info(&spec, 64, &info), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(info.name, facts.name);
    EXPECT_EQ(info.code_bytes_per_row,
              static_cast<uint32_t>(format::code_bytes_per_row(spec_of_format, 64)));
    EXPECT_EQ(info.scale_bytes_per_row,
              static_cast<uint32_t>(format::scale_bytes_per_row(spec_of_format, 64)));
    EXPECT_EQ(info.groups_per_row,
              static_cast<uint32_t>(format::groups_per_row(spec_of_format, 64)));
  }
}

TEST(FormatInfo, TakesOptionsAndRefusesThoseThatAFormatHasNot) {
  auto info = sized<kvx_format_info_t>();
  kvx_format_spec_t spec = format_spec(KVX_FORMAT_INT8, KVX_SCALE_SOURCE_PAGE_SHARED);
  ASSERT_EQ(kvx_format_info(&spec, 64, &info), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(info.scale_source, uint32_t{KVX_SCALE_SOURCE_PAGE_SHARED});
  spec.scale_type = KVX_SCALE_TYPE_E8M0;
  EXPECT_EQ(kvx_format_info(&spec, 64, &info), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(FormatInfo, RefusesNumbersThatAreNone) {
  auto info = sized<kvx_format_info_t>();
  const auto refused = [&](auto change, uint32_t head_dim = 64) {
    kvx_format_spec_t spec = format_spec(KVX_FORMAT_INT8);
    change(spec);
    const kvx_format_info_t before = info;
    EXPECT_EQ(kvx_format_info(&spec, head_dim, &info), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(memcmp(&before, &info, sizeof info), 0);
  };
  refused([](auto& spec) { spec.format = 0; });
  refused([](auto& spec) { spec.format = KVX_FORMAT_INT2_DUAL + 1; });
  refused([](auto& spec) { spec.format = UINT32_MAX; });
  refused([](auto& spec) { spec.group_size = 7; });
  refused([](auto& spec) { spec.group_size = UINT32_MAX - 1; });
  refused([](auto& spec) { spec.scale_type = 6; });
  refused([](auto& spec) { spec.scale_rule = 5; });
  refused([](auto& spec) { spec.scale_source = 4; });
  refused([](auto& spec) { spec.scale_choice = 4; });
  refused([](auto& spec) { spec.reserved = 1; });
  refused([](auto& spec) { spec.size = 7; });
  refused([](auto&) {}, 0);
  refused([](auto&) {}, UINT32_MAX);
  EXPECT_EQ(kvx_format_info(nullptr, 64, &info), KVX_STATUS_INVALID_ARGUMENT);
  const kvx_format_spec_t spec = format_spec(KVX_FORMAT_INT8);
  EXPECT_EQ(kvx_format_info(&spec, 64, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(FormatInfo, FillsNoMoreThanTheCallersSize) {
  const kvx_format_spec_t spec = format_spec(KVX_FORMAT_INT8);
  kvx_format_info_t info;
  memset(&info, 0xAB, sizeof info);
  info.size = 28;
  ASSERT_EQ(kvx_format_info(&spec, 64, &info), KVX_STATUS_OK);
  EXPECT_EQ(info.size, 28u);
  EXPECT_EQ(info.groups_per_row, 0xABABABABu);
}

TEST(NewStructs, MayBeShorterAndMayBeLongerWithATailOfZeros) {
  auto info = sized<kvx_format_info_t>();
  kvx_format_spec_t spec = format_spec(KVX_FORMAT_INT4);
  spec.scale_source = 99;  // beyond an older caller's struct
  spec.size = 12;
  EXPECT_EQ(kvx_format_info(&spec, 64, &info), KVX_STATUS_OK) << kvx_last_error();

  struct {
    kvx_format_spec_t spec;
    uint64_t tail;
  } longer = {format_spec(KVX_FORMAT_INT4), 0};
  longer.spec.size = sizeof longer;
  EXPECT_EQ(kvx_format_info(&longer.spec, 64, &info), KVX_STATUS_OK) << kvx_last_error();
  longer.tail = 1;
  EXPECT_EQ(kvx_format_info(&longer.spec, 64, &info), KVX_STATUS_INCOMPATIBLE);
  longer.spec.size = UINT32_MAX;
  EXPECT_EQ(kvx_format_info(&longer.spec, 64, &info), KVX_STATUS_INCOMPATIBLE);
}

TEST(Pages, HoldJustTheCodesAndScalesOfTheirRows) {
  PagedLayer layer({}, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_BF16));
  ASSERT_EQ(layer.status, KVX_STATUS_OK) << kvx_last_error();
  auto info = sized<kvx_format_info_t>();
  ASSERT_EQ(kvx_format_info(&layer.k_spec, 32, &info), KVX_STATUS_OK);
  EXPECT_EQ(layer.bytes_per_token, 32u + info.scale_bytes_per_row + 64u);
}

TEST(Pages, OfZerosDecodeToZerosInEveryFormat) {
  for (const format::Facts* facts : format::kRowFacts) {
    const auto number = static_cast<uint32_t>(facts->id) + 1;
    SCOPED_TRACE(facts->name);
    const kvx_format_spec_t spec = in_page(static_cast<kvx_format_t>(number));
    PagedLayer layer({}, spec, spec);
    ASSERT_EQ(layer.status, KVX_STATUS_OK) << kvx_last_error();
    const OneSequence sequence({0, 5}, 16);
    std::vector<float> k(16 * 64, 1.0f);
    std::vector<float> v(16 * 64, 1.0f);
    ASSERT_EQ(gather_rows(layer.layer, sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(k, std::vector<float>(16 * 64));
    EXPECT_EQ(v, std::vector<float>(16 * 64));
  }
}

TEST(Pages, RefuseWhatTheyCannotHold) {
  PagedLayer given({}, format_spec(KVX_FORMAT_FP8_E4M3, KVX_SCALE_SOURCE_GIVEN),
                   in_page(KVX_FORMAT_INT8));
  EXPECT_EQ(given.status, KVX_STATUS_UNSUPPORTED);
  PagedLayer odd({.block_size = 6}, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT8));
  EXPECT_EQ(odd.status, KVX_STATUS_INVALID_ARGUMENT);
  PagedLayer fine({}, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT8));
  kvx_side_t side = sized<kvx_side_t>();
  EXPECT_EQ(kvx_describe_pages(&fine.page, nullptr, 2, &side, &side), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_describe_pages(&fine.page, &fine, 0, &side, &side), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_describe_pages(&fine.page, &fine, 2, nullptr, &side), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_describe_pages(&fine.page, &fine, 2, &side, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_page_bytes_per_token(nullptr, &fine.bytes_per_token), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_page_bytes_per_token(&fine.page, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kvx::api_test
