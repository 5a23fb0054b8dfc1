// Every struct of the C ABI has the offsets and sizes of its specification, in C++ and in C.
#include <gtest/gtest.h>

#include <cstddef>
#include <fstream>
#include <set>
#include <string>

#include "kvx/kvx_abi.h"
#include "tests/api/layout_c.h"
#include "tests/support/find_words.hpp"

namespace {

// A table, not a line of test each: hundreds of EXPECT_EQ cost a compiler more than all else here.
struct Measure {
  const char* what;
  size_t actual;
  size_t expected;
};
#define KVX_STRUCT(type, bytes, alignment) \
  {"sizeof(" #type ")", sizeof(type), bytes}, {"alignof(" #type ")", alignof(type), alignment},
#define KVX_FIELD(type, field, offset) {#type "." #field, offsetof(type, field), offset},
constexpr Measure kMeasures[] = {
#include "api/layout.inc"
};
#undef KVX_STRUCT
#undef KVX_FIELD

TEST(Layout, OfEveryStructInCppIsTheSpecifications) {
  for (const Measure& measure : kMeasures) {
    EXPECT_EQ(measure.actual, measure.expected) << measure.what;
  }
}

// layout_c.c makes the same list with a C compiler.
TEST(Layout, OfEveryStructInCIsTheSpecifications) {
  EXPECT_STREQ(kvx_first_wrong_layout_in_c(), "");
}

TEST(Layout, IsWrittenDownForEveryStructOfTheHeader) {
  std::ifstream header(KVX_SOURCE_DIR "/include/kvx/kvx_abi.h");
  ASSERT_TRUE(header) << "the header is where it was";
  const std::set<std::string> listed{
#define KVX_STRUCT(type, bytes, alignment) #type,
#define KVX_FIELD(type, field, offset)
#include "api/layout.inc"
  };
#undef KVX_STRUCT
#undef KVX_FIELD
  const std::string text(std::istreambuf_iterator<char>(header), {});
  EXPECT_EQ(kvx::tests::find_words(text, R"(typedef struct \w+ \{[^}]*\} (kvx_\w+_t);)"), listed);
}

TEST(Numbers, OfTheEnumsAreTheSpecifications) {
  EXPECT_EQ(KVX_STATUS_OK, 0);
  EXPECT_EQ(KVX_STATUS_INTERNAL_ERROR, 5);
  EXPECT_EQ(KVX_DTYPE_INVALID, 0);
  EXPECT_EQ(KVX_DTYPE_F16, 1);
  EXPECT_EQ(KVX_DTYPE_BF16, 2);
  EXPECT_EQ(KVX_DTYPE_F32, 3);
  EXPECT_EQ(KVX_DTYPE_F8_E4M3, 4);
  EXPECT_EQ(KVX_DTYPE_F8_E5M2, 5);
  EXPECT_EQ(KVX_DTYPE_S32, 6);
  EXPECT_EQ(KVX_DTYPE_S64, 7);
  EXPECT_EQ(KVX_DTYPE_U32, 8);
  EXPECT_EQ(KVX_DTYPE_U64, 9);
  EXPECT_EQ(KVX_DTYPE_U8, 10);
  EXPECT_EQ(KVX_MEMORY_UNKNOWN, 0);
  EXPECT_EQ(KVX_MEMORY_HOST, 1);
  EXPECT_EQ(KVX_MEMORY_DEVICE, 2);
  EXPECT_EQ(KVX_MEMORY_UNIFIED, 3);
  EXPECT_EQ(KVX_LAYOUT_INVALID, 0);
  EXPECT_EQ(KVX_LAYOUT_BLOCK_NHD, 1);
  EXPECT_EQ(KVX_LAYOUT_BLOCK_HND, 2);
  EXPECT_EQ(KVX_LAYOUT_BLOCK_HND_PACKED, 3);
  EXPECT_EQ(KVX_LAYOUT_BLOCK_CUSTOM, 15);
  EXPECT_EQ(KVX_MAX_TENSOR_DIMS, 5);
  EXPECT_EQ(KVX_BLOCK_TABLE_INVALID, 0);
  EXPECT_EQ(KVX_BLOCK_TABLE_PACKED, 1);
  EXPECT_EQ(KVX_BLOCK_TABLE_RAGGED, 2);
  EXPECT_EQ(KVX_BLOCK_TABLE_KV_OFFSETS, 3);
  EXPECT_EQ(KVX_BLOCK_TABLE_FLAG_NONE, 0);
  EXPECT_EQ(KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX, 1);
  EXPECT_EQ(KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES, 2);
  EXPECT_EQ(KVX_SCALE_NONE, 0);
  EXPECT_EQ(KVX_SCALE_PER_TENSOR, 1);
  EXPECT_EQ(KVX_SCALE_PER_BLOCK, 2);
  EXPECT_EQ(KVX_SCALE_PER_HEAD, 3);
  EXPECT_EQ(KVX_SCALE_PER_BLOCK_HEAD, 4);
}

}  // namespace
