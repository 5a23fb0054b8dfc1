// Bad input at the API boundary of 1.2's verbs: a status and a message, never a crash, and no byte
// of the layers changed.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::verbs_bad_input_test {
namespace {

constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;
constexpr auto kOutOfRange = KVX_STATUS_OUT_OF_RANGE;
constexpr auto kIncompatible = KVX_STATUS_INCOMPATIBLE;

// A legal call of every verb over two layers, which a test then spoils in one place.
struct Calls {
  Calls() : from(KVX_FORMAT_INT8), to(KVX_FORMAT_INT4), k(from.k), v(from.v) {
    k_rows = api::rows(k.data(), KVX_DTYPE_F32);
    v_rows = api::rows(v.data(), KVX_DTYPE_F32);
    append.layer = gather.layer = copy.from = transcode.from = &from.layer.layer;
    copy.to = transcode.to = &to.layer.layer;
    append.slot_dtype = transcode.slot_dtype = KVX_DTYPE_S64;
    append.k = gather.k = &k_rows;
    append.v = gather.v = &v_rows;
    append.slots = transcode.from_slots = slots.data();
    transcode.to_slots = other_slots.data();
    append.num_tokens = transcode.num_tokens = std::ssize(slots);
    gather.block_table = &from.sequence.table;
    gather.seq_lens = &from.sequence.seq_lens;
    gather.num_ranges = 1;
    copy.num_copies = 2;
    copy.from_blocks = blocks.data();
    copy.to_blocks = other_blocks.data();
  }
  Calls(const Calls&) = delete;

  Filled from;
  Filled to;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<int64_t> slots = {3, 17, 40};
  std::vector<int64_t> other_slots = {0, 9, 47};
  std::vector<int64_t> blocks = {1, 4};
  std::vector<int64_t> other_blocks = {0, 2};
  kvx_rows_t k_rows;
  kvx_rows_t v_rows;
  kvx_append_args_t append = sized<kvx_append_args_t>();
  kvx_gather_args_t gather = sized<kvx_gather_args_t>();
  kvx_copy_args_t copy = sized<kvx_copy_args_t>();
  kvx_transcode_args_t transcode = sized<kvx_transcode_args_t>();
};

struct Case {
  const char* name;
  kvx_status_t expected;
  std::function<void(Calls&)> spoil;
};

void expect_refused(const std::vector<Case>& cases, kvx_status_t (*call)(Calls&)) {
  {
    Calls calls;
    ASSERT_EQ(call(calls), KVX_STATUS_OK) << kvx_last_error();
  }
  for (const Case& spoiled : cases) {
    SCOPED_TRACE(spoiled.name);
    Calls calls;
    spoiled.spoil(calls);
    const auto from = calls.from.layer.memory;
    const auto to = calls.to.layer.memory;
    const auto k = calls.k;
    EXPECT_EQ(call(calls), spoiled.expected) << kvx_last_error();
    EXPECT_STRNE(kvx_last_error(), "");
    EXPECT_TRUE(calls.from.layer.memory == from && calls.to.layer.memory == to && calls.k == k);
  }
}

TEST(BadVerbs, OfAppendAreRefused) {
  const std::vector<Case> cases = {
      {"size", kInvalid, [](Calls& c) { c.append.size = 4; }},
      {"size that ends inside a pointer", kInvalid, [](Calls& c) { c.append.size = 12; }},
      {"size endless", kIncompatible, [](Calls& c) { c.append.size = UINT32_MAX; }},
      {"layer", kInvalid, [](Calls& c) { c.append.layer = nullptr; }},
      {"k", kInvalid, [](Calls& c) { c.append.k = nullptr; }},
      {"v", kInvalid, [](Calls& c) { c.append.v = nullptr; }},
      {"slots", kInvalid, [](Calls& c) { c.append.slots = nullptr; }},
      {"slot_dtype", kInvalid, [](Calls& c) { c.append.slot_dtype = KVX_DTYPE_U64; }},
      {"slot_dtype unheard of", kInvalid, [](Calls& c) { c.append.slot_dtype = UINT32_MAX; }},
      {"num_tokens", kInvalid, [](Calls& c) { c.append.num_tokens = -1; }},
      {"num_tokens least", kInvalid, [](Calls& c) { c.append.num_tokens = INT64_MIN; }},
      {"k.data", kInvalid, [](Calls& c) { c.k_rows.data = nullptr; }},
      {"v.dtype", kInvalid, [](Calls& c) { c.v_rows.dtype = KVX_DTYPE_F8_E4M3; }},
      {"k.dtype unheard of", kInvalid, [](Calls& c) { c.k_rows.dtype = 0x80000003u; }},
      {"k.size", kInvalid, [](Calls& c) { c.k_rows.size = 0; }},
      {"k.token_stride", kInvalid, [](Calls& c) { c.k_rows.token_stride = -64; }},
      {"v.head_stride least", kInvalid, [](Calls& c) { c.v_rows.head_stride = INT64_MIN; }},
      {"v.token_stride most", kInvalid, [](Calls& c) { c.v_rows.token_stride = INT64_MAX; }},
      {"a slot beyond", kOutOfRange, [](Calls& c) { c.slots[1] = 48; }},
      {"a slot far beyond", kOutOfRange, [](Calls& c) { c.slots[2] = INT64_MAX; }},
      {"rows over the layer", kInvalid,
       [](Calls& c) { c.k_rows.data = c.from.layer.memory.data(); }},
  };
  expect_refused(cases, [](Calls& c) { return kvx_append(&c.append, nullptr); });
}

TEST(BadVerbs, OfGatherAreRefused) {
  const std::vector<Case> cases = {
      {"size", kInvalid, [](Calls& c) { c.gather.size = 7; }},
      {"layer", kInvalid, [](Calls& c) { c.gather.layer = nullptr; }},
      {"block_table", kInvalid, [](Calls& c) { c.gather.block_table = nullptr; }},
      {"seq_lens", kInvalid, [](Calls& c) { c.gather.seq_lens = nullptr; }},
      {"num_ranges", kInvalid, [](Calls& c) { c.gather.num_ranges = 2; }},
      {"some arrays", kInvalid, [](Calls& c) { c.gather.first_rows = c.slots.data(); }},
      {"num_rows", kInvalid, [](Calls& c) { c.gather.num_rows = -1; }},
      {"num_rows of fewer tokens", kOutOfRange, [](Calls& c) { c.gather.num_rows = 1; }},
      {"k.dtype", kInvalid, [](Calls& c) { c.k_rows.dtype = KVX_DTYPE_S32; }},
      {"table.size", kInvalid, [](Calls& c) { c.from.sequence.table.size = 8; }},
      {"table.format", kInvalid,  // without its flag
       [](Calls& c) { c.from.sequence.table.format = KVX_BLOCK_TABLE_KV_OFFSETS; }},
      {"table.flags", kIncompatible, [](Calls& c) { c.from.sequence.table.flags = 1u << 31; }},
      {"table.indices", kInvalid, [](Calls& c) { c.from.sequence.table.indices = nullptr; }},
      {"table.indices_count", kInvalid,
       [](Calls& c) { c.from.sequence.table.indices_count = UINT32_MAX; }},
      {"table.seq_count most", kInvalid,
       [](Calls& c) { c.from.sequence.table.seq_count = UINT32_MAX; }},
      {"lengths", kInvalid, [](Calls& c) { c.from.sequence.seq_lens.lengths = nullptr; }},
      {"a length below 0", kInvalid, [](Calls& c) { c.from.sequence.lengths[0] = -1; }},
      {"a length beyond the table", kOutOfRange,
       [](Calls& c) { c.from.sequence.lengths[0] = INT32_MAX; }},
      {"a block beyond", kOutOfRange, [](Calls& c) { c.from.sequence.blocks[1] = 6; }},
      {"a block far beyond", kOutOfRange, [](Calls& c) { c.from.sequence.blocks[0] = INT32_MAX; }},
      {"rows over the layer", kInvalid,
       [](Calls& c) { c.v_rows.data = c.from.layer.memory.data() + 8; }},
  };
  expect_refused(cases, [](Calls& c) { return kvx_gather(&c.gather, nullptr); });
}

TEST(BadVerbs, OfCopyBlocksAreRefused) {
  const std::vector<Case> cases = {
      {"size", kInvalid, [](Calls& c) { c.copy.size = 0; }},
      {"from", kInvalid, [](Calls& c) { c.copy.from = nullptr; }},
      {"to", kInvalid, [](Calls& c) { c.copy.to = nullptr; }},
      {"from_blocks", kInvalid, [](Calls& c) { c.copy.from_blocks = nullptr; }},
      {"to_blocks", kInvalid, [](Calls& c) { c.copy.to_blocks = nullptr; }},
      {"a source beyond", kOutOfRange, [](Calls& c) { c.blocks[1] = 6; }},
      {"a source below", kOutOfRange, [](Calls& c) { c.blocks[0] = -1; }},
      {"a target beyond", kOutOfRange, [](Calls& c) { c.other_blocks[1] = INT64_MAX; }},
      {"another block size", kInvalid, [](Calls& c) { c.to.layer.layer.block_size = 4; }},
  };
  expect_refused(cases, [](Calls& c) { return kvx_copy_blocks(&c.copy, nullptr); });
}

TEST(BadVerbs, OfTranscodeAreRefused) {
  const std::vector<Case> cases = {
      {"size", kInvalid, [](Calls& c) { c.transcode.size = 5; }},
      {"from", kInvalid, [](Calls& c) { c.transcode.from = nullptr; }},
      {"to", kInvalid, [](Calls& c) { c.transcode.to = nullptr; }},
      {"from_slots", kInvalid, [](Calls& c) { c.transcode.from_slots = nullptr; }},
      {"to_slots", kInvalid, [](Calls& c) { c.transcode.to_slots = nullptr; }},
      {"slot_dtype", kInvalid, [](Calls& c) { c.transcode.slot_dtype = 0; }},
      {"num_tokens", kInvalid, [](Calls& c) { c.transcode.num_tokens = INT64_MIN; }},
      {"a source beyond", kOutOfRange, [](Calls& c) { c.slots[0] = 48; }},
      {"a target beyond", kOutOfRange, [](Calls& c) { c.other_slots[2] = INT64_MAX; }},
      {"another head_dim", kInvalid, [](Calls& c) { c.to.layer.v.head_dim = 16; }},
      {"layers of one memory", kInvalid, [](Calls& c) { c.transcode.to = &c.from.layer.layer; }},
      {"num_tokens beyond addresses", kInvalid,
       [](Calls& c) { c.transcode.num_tokens = int64_t{1} << 61; }},
  };
  expect_refused(cases, [](Calls& c) { return kvx_transcode(&c.transcode, nullptr); });
}

TEST(BadVerbs, OfMoreHeadsThanAGridHasAreRefused) {
  Calls calls;
  calls.from.layer.layer.num_kv_heads = 65536;
  EXPECT_EQ(kvx_append(&calls.append, nullptr), kInvalid);
  EXPECT_NE(
      strstr(kvx_last_error(), "65536 KV heads; expected at least 1 of each and at most 65535"),
      nullptr)
      << kvx_last_error();
}

// Given scales per block or token are not checked in advance. Their rows decode with them, whatever
// they are, and no other byte changes.
TEST(BadVerbs, GivenScalesOfABlockAreUsedAsTheyAre) {
  const kvx_format_spec_t spec = format_spec(KVX_FORMAT_FP8_E4M3, KVX_SCALE_SOURCE_GIVEN);
  constexpr int kBlocks = 4, kBlockTokens = 2, kDim = 16;
  std::vector<uint8_t> codes(kBlocks * kBlockTokens * kDim, 0xEE);
  std::vector<float> scales = {0.5f, NAN, -0.5f, 0.0f};  // a block each
  auto side = sized<kvx_side_t>();
  side.head_dim = kDim;
  side.spec = &spec;
  side.codes = codes.data();
  side.code_block_stride = kBlockTokens * kDim;
  side.code_token_stride = side.code_head_stride = kDim;
  side.scales = scales.data();
  side.scale_block_stride = 4;
  auto run = sized<kvx_head_run_t>();
  run.num_heads = 1;
  run.k = &side;
  const kvx_head_run_t* runs = &run;
  auto layer = sized<kvx_layer_t>();
  layer.block_size = kBlockTokens;
  layer.num_blocks = kBlocks;
  layer.num_kv_heads = layer.num_runs = 1;
  layer.runs = &runs;
  const std::vector<float> rows(4 * kDim, 2.0f);
  ASSERT_EQ(append_rows(layer, rows, {}, {0, 2, 4, 6}), KVX_STATUS_OK) << kvx_last_error();
  for (int token = 1; token < kBlocks * kBlockTokens; token += 2) {
    EXPECT_EQ(codes[static_cast<size_t>(token) * kDim], 0xEE) << "a row that was not written";
  }
  OneSequence sequence({0, 1, 2, 3}, 7);
  std::vector<float> found(7 * kDim);
  const kvx_rows_t k_rows = api::rows(found.data(), KVX_DTYPE_F32);
  auto gather = sized<kvx_gather_args_t>();
  gather.layer = &layer;
  gather.block_table = &sequence.table;
  gather.seq_lens = &sequence.seq_lens;
  gather.num_ranges = 1;
  gather.k = &k_rows;
  ASSERT_EQ(kvx_gather(&gather, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(found[0], 2.0f);
  EXPECT_TRUE(std::isnan(found[2 * kDim])) << "a NaN scale stays visible";
  EXPECT_EQ(found[4 * kDim], 0.0f) << "negative steps represent nothing";
  EXPECT_EQ(found[6 * kDim], 0.0f) << "nor in steps of zero";
}

}  // namespace
}  // namespace kvx::api_test::verbs_bad_input_test
