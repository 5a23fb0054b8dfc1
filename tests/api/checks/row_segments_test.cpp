// Rows of K in two segments (kvx_head_run_t.k_rest): a latent row's numbers in 4 bits and its
// rotary ones in 16, side by side in one record, through every verb.
#include <gmock/gmock.h>

#include <bit>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::row_segments_test {
namespace {

using testing::HasSubstr;

constexpr int kLatent = 64;
constexpr int kRotary = 32;
constexpr int kRow = kLatent + kRotary;
// A token's record: [nvfp4 codes: 32][E4M3 scales: 4][unused: 4][bf16: 64]
constexpr int64_t kScalesAt = 32;
constexpr int64_t kRotaryAt = 40;
constexpr int64_t kRecord = 104;

struct RecordLayer : PrefixLayer {
  RecordLayer()
      : PrefixLayer(kLatent),
        latent_spec(format_spec(KVX_FORMAT_NVFP4)),
        rotary_spec(format_spec(KVX_FORMAT_BF16)) {
    k.head_dim = kLatent;
    k.spec = &latent_spec;
    k.codes = memory.data();
    k.scales = memory.data() + kScalesAt;
    k.scale_group_stride = 1;
    k.scale_token_stride = k.code_token_stride = kRecord;
    k.scale_head_stride = k.code_head_stride = kRecord;
    k.scale_block_stride = k.code_block_stride = kRecord * 8;
    rest.head_dim = kRotary;
    rest.spec = &rotary_spec;
    rest.codes = memory.data() + kRotaryAt;
    rest.code_token_stride = rest.code_head_stride = kRecord;
    rest.code_block_stride = kRecord * 8;
    run.k_rest = &rest;
    layer.block_size = 8;
    layer.num_blocks = 6;
  }

  std::vector<uint8_t> memory = std::vector<uint8_t>(6 * 8 * kRecord, 0xAB);
  kvx_format_spec_t latent_spec, rotary_spec;
  kvx_side_t rest = sized<kvx_side_t>();
};

struct Stored {
  explicit Stored(RecordLayer& layer) : sequence({4, 1, 5}, kTokens) {
    EXPECT_EQ(layer.append(rows, slots_of(sequence, 8)), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(gather_rows(layer.layer, sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
  }
  OneSequence sequence;
  std::vector<float> rows = test_rows(kTokens, 1, kRow, 0.3f);
  std::vector<float> k = std::vector<float>(kTokens * kRow);
  std::vector<float> v = std::vector<float>(kTokens * kLatent);
};

// To nearest even, of numbers that are finite.
float bf16_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u);
}

TEST(RowSegments, AreStoredInTheirOwnFormats) {
  RecordLayer layer;
  const Stored stored(layer);
  for (int t = 0; t < kTokens; ++t) {
    for (int d = 0; d < kRow; ++d) {
      const float number = stored.rows[t * kRow + d];
      if (d < kLatent) {
        ASSERT_NEAR(stored.k[t * kRow + d], number, 0.3) << t << ", " << d;
        ASSERT_EQ(stored.v[t * kLatent + d], stored.k[t * kRow + d]);
      } else {
        ASSERT_EQ(stored.k[t * kRow + d], bf16_of(number)) << t << ", " << d;
      }
    }
  }
  for (const int64_t slot : slots_of(stored.sequence, 8)) {
    for (int64_t i = kScalesAt + 4; i < kRotaryAt; ++i) {
      ASSERT_EQ(layer.memory[slot * kRecord + i], 0xAB) << "bytes between the segments";
    }
  }
}

TEST(RowSegments, AreOneRowToAttention) {
  RecordLayer layer;
  const Stored stored(layer);
  const std::vector<float> q = test_rows(1, kQHeads, kRow, 4.2f);
  std::vector<float> out(kQHeads * kLatent);
  const kvx_rows_t q_rows = api::rows(q.data(), KVX_DTYPE_F32);
  const kvx_rows_t out_rows = api::rows(out.data(), KVX_DTYPE_F32);
  auto args = sized<kvx_attend_args_t>();
  args.layer = &layer.layer;
  args.block_table = &stored.sequence.table;
  args.seq_lens = &stored.sequence.seq_lens;
  args.num_q_heads = kQHeads;
  args.q = &q_rows;
  args.out = &out_rows;
  ASSERT_EQ(kvx_attend(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  Geometry geometry;
  geometry.head_dim = kRow;
  geometry.num_kv_heads = 1;
  const std::vector<float> whole =
      plain_attention(q, stored.k, stored.k, 1, kTokens, kQHeads, geometry);
  std::vector<float> expected;
  for (int h = 0; h < kQHeads; ++h) {
    expected.insert(expected.end(), whole.begin() + h * kRow, whole.begin() + h * kRow + kLatent);
  }
  EXPECT_LT(largest_difference(out, expected), 2e-5);
}

TEST(RowSegments, AreCopiedAndTranscodedTogether) {
  RecordLayer from;
  const Stored stored(from);
  RecordLayer copied;
  const std::vector<int64_t> blocks = {4, 1, 5};
  auto copy = sized<kvx_copy_args_t>();
  copy.from = &from.layer;
  copy.to = &copied.layer;
  copy.num_copies = 3;
  copy.from_blocks = copy.to_blocks = blocks.data();
  ASSERT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_OK) << kvx_last_error();
  std::vector<float> k(stored.k.size());
  std::vector<float> v(stored.v.size());
  ASSERT_EQ(gather_rows(copied.layer, stored.sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(k, stored.k);

  RecordLayer transcoded;
  const std::vector<int64_t> slots = slots_of(stored.sequence, 8);
  auto args = sized<kvx_transcode_args_t>();
  args.from = &from.layer;
  args.to = &transcoded.layer;
  args.slot_dtype = KVX_DTYPE_S64;
  args.from_slots = args.to_slots = slots.data();
  args.num_tokens = static_cast<int64_t>(slots.size());
  ASSERT_EQ(kvx_transcode(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  ASSERT_EQ(gather_rows(transcoded.layer, stored.sequence, k, v), KVX_STATUS_OK);
  EXPECT_LT(largest_difference(k, stored.k), 1e-6);
}

TEST(RowSegments, AreRefusedWhereTheyCannotBe) {
  const OneSequence sequence({4, 1, 5}, kTokens);
  const std::vector<float> rows = test_rows(kTokens, 1, kRow, 0.3f);
  const auto error_of = [&](const auto& spoil) {
    RecordLayer layer;
    spoil(layer);
    EXPECT_NE(layer.append(rows, slots_of(sequence, 8)), KVX_STATUS_OK);
    return std::string(kvx_last_error());
  };
  EXPECT_THAT(error_of([](RecordLayer& l) { l.rest.codes = nullptr; }),
              HasSubstr("layer.runs[0].k_rest.codes is null"));
  EXPECT_THAT(error_of([](RecordLayer& l) { l.rest.head_dim = 0; }), HasSubstr("head_dim is 0"));
  EXPECT_THAT(error_of([](RecordLayer& l) { l.rest.flags = KVX_SIDE_PREFIX_OF_K; }),
              HasSubstr("layer.runs[0].k_rest.flags"));
  EXPECT_THAT(error_of([](RecordLayer& l) { l.v.head_dim = kRow; }),
              HasSubstr("layer.runs[0].v.head_dim is 96; expected 1 to K's 64"));
}

TEST(RowSegments, AreNotCopiedIntoRowsOfOneSegment) {
  RecordLayer from;
  const Stored stored(from);
  RecordLayer to;
  to.run.k_rest = nullptr;
  const int64_t block = 0;
  auto copy = sized<kvx_copy_args_t>();
  copy.from = &from.layer;
  copy.to = &to.layer;
  copy.num_copies = 1;
  copy.from_blocks = copy.to_blocks = &block;
  EXPECT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("segment 1 of K's rows has 32 numbers in from and 0"));
}

}  // namespace
}  // namespace kvx::api_test::row_segments_test
