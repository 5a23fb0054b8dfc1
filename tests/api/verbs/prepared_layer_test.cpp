// What prepared layers and the workspace of a range of calls refuse, on any machine. tests/gpu runs
// them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;

TEST(PreparedLayer, IsRefusedOnTheHostAndForNull) {
  Filled filled(KVX_FORMAT_INT8);
  kvx_prepared_layer_t prepared = nullptr;
  EXPECT_EQ(kvx_prepare_layer(&filled.layer.layer, nullptr, &prepared), KVX_STATUS_UNSUPPORTED);
  EXPECT_THAT(kvx_last_error(), HasSubstr("layer lies on the host"));
  EXPECT_EQ(kvx_prepare_layer(&filled.layer.layer, nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_prepare_layer(nullptr, nullptr, &prepared), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(prepared, nullptr);
}

TEST(PreparedLayer, MustBeAHandle) {
  Filled filled(KVX_FORMAT_INT8);
  Attention attention(filled.layer.layer, filled.sequence, 1);
  const auto append = sized<kvx_append_args_t>();
  int nothing = 0;
  const auto stale = reinterpret_cast<kvx_prepared_layer_t>(&nothing);
  for (const kvx_prepared_layer_t handle : {kvx_prepared_layer_t{}, stale}) {
    EXPECT_EQ(kvx_prepared_append(handle, &append, nullptr), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(kvx_last_error(), HasSubstr("prepared is"));
    EXPECT_EQ(kvx_prepared_attend(handle, &attention.args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(kvx_last_error(), HasSubstr("prepared is"));
    kvx_prepared_layer_free(handle);
  }
}

kvx_attend_bounds_t some_bounds() {
  auto bounds = sized<kvx_attend_bounds_t>();
  bounds.max_sequences = 4;
  bounds.max_queries = 64;
  bounds.max_tokens = 1024;
  bounds.max_q_len = 32;
  return bounds;
}

TEST(AttendWorkspaceUpTo, IsZeroOnTheHostWithoutTheArraysOfABatch) {
  Filled filled(KVX_FORMAT_INT8);
  auto args = sized<kvx_attend_args_t>();
  args.layer = &filled.layer.layer;
  args.num_q_heads = kQHeads;
  const kvx_attend_bounds_t bounds = some_bounds();
  uint64_t bytes = 99;
  ASSERT_EQ(kvx_attend_workspace_up_to(&args, &bounds, &bytes), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(bytes, 0u);
  args.full_precision = args.layer;
  bytes = 99;
  ASSERT_EQ(kvx_attend_workspace_up_to(&args, &bounds, &bytes), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(bytes, 0u);
}

TEST(AttendWorkspaceUpTo, RefusesBoundsThatNoCallHas) {
  Filled filled(KVX_FORMAT_INT8);
  auto args = sized<kvx_attend_args_t>();
  args.layer = &filled.layer.layer;
  args.num_q_heads = kQHeads;
  uint64_t bytes = 99;
  const auto refused = [&](const char* words, auto change) {
    kvx_attend_bounds_t bounds = some_bounds();
    change(bounds);
    EXPECT_EQ(kvx_attend_workspace_up_to(&args, &bounds, &bytes), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(kvx_last_error(), HasSubstr(words));
    EXPECT_EQ(bytes, 99u);
  };
  refused("bounds.max_sequences is 0", [](auto& bounds) { bounds.max_sequences = 0; });
  refused("bounds.max_sequences is 65536", [](auto& bounds) { bounds.max_sequences = 65536; });
  refused("bounds.max_queries is 0", [](auto& bounds) { bounds.max_queries = 0; });
  refused("bounds.max_queries is", [](auto& bounds) { bounds.max_queries = INT64_MAX; });
  refused("bounds.max_tokens is 0", [](auto& bounds) { bounds.max_tokens = 0; });
  refused("bounds.max_q_len is 0", [](auto& bounds) { bounds.max_q_len = 0; });
  refused("bounds.reserved is 1", [](auto& bounds) { bounds.reserved = 1; });
  EXPECT_EQ(kvx_attend_workspace_up_to(&args, nullptr, &bytes), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_attend_workspace_up_to(nullptr, nullptr, &bytes), KVX_STATUS_INVALID_ARGUMENT);
  const kvx_attend_bounds_t bounds = some_bounds();
  EXPECT_EQ(kvx_attend_workspace_up_to(&args, &bounds, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  args.num_q_heads = 3;
  EXPECT_EQ(kvx_attend_workspace_up_to(&args, &bounds, &bytes), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("num_q_heads is 3"));
}

}  // namespace
}  // namespace kvx::api_test
