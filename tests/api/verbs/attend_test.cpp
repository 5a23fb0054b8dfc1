// kvx_attend over callers' memory: formats, layouts, tables, full-precision window.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test {
namespace {

TEST(Attend, IsAttentionOverTheRowsThatGatherGives) {
  for (const kvx_format_t format :
       {KVX_FORMAT_F32, KVX_FORMAT_F16, KVX_FORMAT_INT8, KVX_FORMAT_INT4, KVX_FORMAT_NVFP4}) {
    for (const int num_queries : {1, 5}) {
      SCOPED_TRACE(std::to_string(format) + ", queries " + std::to_string(num_queries));
      Filled filled(format, KVX_FORMAT_INT8);
      std::vector<float> k(filled.k.size());
      std::vector<float> v(filled.v.size());
      ASSERT_EQ(gather_rows(filled.layer.layer, filled.sequence, k, v), KVX_STATUS_OK);
      Attention attention(filled.layer.layer, filled.sequence, num_queries);
      if (num_queries == 1) attention.args.q_starts = nullptr;
      ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
      const std::vector<float> expected =
          plain_attention(attention.q, k, v, num_queries, kTokens, kQHeads, filled.geometry);
      EXPECT_LT(largest_difference(attention.out, expected), 2e-5);
    }
  }
}

TEST(Attend, ReadsACallersOwnNhdAndHndCaches) {
  const Geometry geometry;
  const std::vector<float> k = test_rows(kTokens, 2, 32, 0.3f);
  const std::vector<float> v = test_rows(kTokens, 2, 32, 1.9f);
  const OneSequence sequence({4, 1, 5}, kTokens);
  for (const kvx_layout_t layout : {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND}) {
    std::vector<float> k_cache(6 * 8 * 64);
    std::vector<float> v_cache(6 * 8 * 64);
    kvx_cache_desc_t cache =
        api::nhd_cache(k_cache.data(), v_cache.data(), KVX_DTYPE_F32, {6, 8, 2, 32});
    if (layout == KVX_LAYOUT_BLOCK_HND) {
      cache.k = api::tensor(k_cache.data(), KVX_DTYPE_F32, layout, {6, 2, 8, 32});
      cache.v = api::tensor(v_cache.data(), KVX_DTYPE_F32, layout, {6, 2, 8, 32});
    }
    auto layer = sized<kvx_layer_t>();
    layer.cache = &cache;
    ASSERT_EQ(append_rows(layer, k, v, slots_of(sequence, 8)), KVX_STATUS_OK) << kvx_last_error();
    const size_t token_1_head_1 =
        4 * 512 + (layout == KVX_LAYOUT_BLOCK_NHD ? 64 + 32 : 8 * 32 + 32);
    EXPECT_EQ(k_cache[token_1_head_1], k[64 + 32]);
    Attention attention(layer, sequence, 1);
    ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_LT(largest_difference(attention.out,
                                 plain_attention(attention.q, k, v, 1, kTokens, kQHeads, geometry)),
              2e-5);
  }
}

TEST(Attend, TakesEveryTableOfOneCache) {
  Filled filled(KVX_FORMAT_INT8);
  Attention packed(filled.layer.layer, filled.sequence, 1);
  ASSERT_EQ(kvx_attend(&packed.args, nullptr), KVX_STATUS_OK);

  const std::vector<int64_t> blocks64 = {4, 1, 5};
  const std::vector<int64_t> lengths64 = {kTokens};
  const std::vector<int32_t> page_sums = {0, 3};
  const std::vector<int32_t> token_sums = {0, kTokens};
  std::vector<int64_t> per_token;
  for (int t = 0; t < kTokens; ++t) per_token.push_back(blocks64[t / 8]);

  kvx_block_table_t table = filled.sequence.table;
  table.index_dtype = KVX_DTYPE_S64;
  table.indices = blocks64.data();
  kvx_seq_lens_t lengths = filled.sequence.seq_lens;
  lengths.dtype = KVX_DTYPE_S64;
  lengths.lengths = lengths64.data();
  Attention ids_in_64_bits(filled.layer.layer, filled.sequence, 1);
  ids_in_64_bits.args.block_table = &table;
  ids_in_64_bits.args.seq_lens = &lengths;
  ASSERT_EQ(kvx_attend(&ids_in_64_bits.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(ids_in_64_bits.out, packed.out);

  table.format = KVX_BLOCK_TABLE_RAGGED;
  table.indptr_dtype = KVX_DTYPE_S32;
  table.indptr_count = 2;
  table.indptr = page_sums.data();
  table.flags = KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
  Attention pages(filled.layer.layer, filled.sequence, 1);
  pages.args.block_table = &table;
  ASSERT_EQ(kvx_attend(&pages.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(pages.out, packed.out);

  table.flags = 0;
  table.indptr = token_sums.data();
  table.indices = per_token.data();
  table.indices_count = kTokens;
  Attention tokens(filled.layer.layer, filled.sequence, 1);
  tokens.args.block_table = &table;
  ASSERT_EQ(kvx_attend(&tokens.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(tokens.out, packed.out);
  per_token[2] = 0;
  EXPECT_EQ(kvx_attend(&tokens.args, nullptr), KVX_STATUS_UNSUPPORTED);
}

TEST(Attend, TakesTensorRtsTablesWithABeamARow) {
  Filled filled(KVX_FORMAT_INT8);
  Attention packed(filled.layer.layer, filled.sequence, 1);
  ASSERT_EQ(kvx_attend(&packed.args, nullptr), KVX_STATUS_OK);

  // [1 sequence, 2 beams, K and V, 3 blocks]
  std::vector<int32_t> offsets = {4, 1, 5, 5, 2, 6, 4, 1, 5, 5, 2, 6};
  kvx_block_table_t table = filled.sequence.table;
  table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  table.beam_width = 2;
  table.indices = offsets.data();
  table.indices_count = 12;
  Attention beams(filled.layer.layer, filled.sequence, 2);
  const std::vector<int32_t> starts = {0, 1, 2};
  beams.args.block_table = &table;
  beams.args.q_starts = starts.data();
  std::copy(packed.q.begin(), packed.q.end(), beams.q.begin());
  std::copy(packed.q.begin(), packed.q.end(), beams.q.begin() + std::ssize(packed.q));
  ASSERT_EQ(kvx_attend(&beams.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  std::vector<float> twice = packed.out;
  twice.insert(twice.end(), packed.out.begin(), packed.out.end());
  EXPECT_EQ(beams.out, twice);

  offsets[10] = 3;
  EXPECT_EQ(kvx_attend(&beams.args, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_THAT(kvx_last_error(), testing::HasSubstr("K 1 of row 1 at 1 and its V at 3"));
  offsets[10] = 2;
  offsets[1] |= INT32_MIN;
  EXPECT_EQ(kvx_attend(&beams.args, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_THAT(kvx_last_error(), testing::HasSubstr("secondary pool, block 1"));
}

TEST(Attend, ReadsFullPrecisionWindowFromAnotherLayer) {
  Filled packed(KVX_FORMAT_INT4);
  Filled full_precision(KVX_FORMAT_F32);
  const std::vector<int32_t> head = {1};
  const std::vector<int32_t> tail = {2};
  Attention attention(packed.layer.layer, packed.sequence, 1);
  attention.args.full_precision = &full_precision.layer.layer;
  attention.args.num_sink_blocks = head.data();
  attention.args.first_recent_blocks = tail.data();
  ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  std::vector<float> k(packed.k.size());
  std::vector<float> v(packed.v.size());
  ASSERT_EQ(gather_rows(packed.layer.layer, packed.sequence, k, v), KVX_STATUS_OK);
  for (size_t i = 0; i < k.size(); ++i) {
    const size_t block = i / 64 / 8;
    if (block == 1) continue;
    k[i] = full_precision.k[i];
    v[i] = full_precision.v[i];
  }
  EXPECT_LT(largest_difference(attention.out, plain_attention(attention.q, k, v, 1, kTokens,
                                                              kQHeads, packed.geometry)),
            2e-5);
  auto transform = sized<kvx_transform_t>();
  transform.flags = KVX_TRANSFORM_HADAMARD;
  full_precision.layer.layer.k_transform = &transform;
  EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  full_precision.layer.layer.k_transform = nullptr;
  attention.out_rows.data = full_precision.layer.memory.data();
  EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_STREQ(kvx_last_error(), "out overlaps the layer's memory; expected memory apart from it");
  attention.out_rows.data = attention.out.data();
  attention.args.first_recent_blocks = nullptr;
  EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(Attend, NeedsNoWorkspaceOnTheCpu) {
  Filled filled(KVX_FORMAT_INT8);
  Attention attention(filled.layer.layer, filled.sequence, 1);
  uint64_t bytes = 99;
  ASSERT_EQ(kvx_attend_workspace(&attention.args, &bytes), KVX_STATUS_OK);
  EXPECT_EQ(bytes, 0u);
}

// Engines keep the tables of a batch in an array for the longest sequence.
TEST(Attend, TakesATableInsideAWiderArray) {
  Filled filled(KVX_FORMAT_INT8);
  Attention dense(filled.layer.layer, filled.sequence, 2);
  dense.starts = {0, 1, 2};
  dense.args.q_starts = dense.starts.data();
  const auto attend_to = [&](auto blocks, kvx_dtype_t dtype, int64_t stride) {
    const std::vector<int32_t> lengths = {kTokens, 9};
    kvx_block_table_t table = filled.sequence.table;
    table.indices = blocks.data();
    table.index_dtype = dtype;
    table.seq_count = 2;
    table.indices_count = 6;
    const kvx_seq_lens_t seq_lens = api::seq_lens(lengths);
    dense.args.block_table = &table;
    dense.args.seq_lens = &seq_lens;
    dense.args.block_table_stride = stride;
    std::fill(dense.out.begin(), dense.out.end(), 9.0f);
    EXPECT_EQ(kvx_attend(&dense.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    return dense.out;
  };
  const std::vector<float> expected =
      attend_to(std::vector<int32_t>{4, 1, 5, 1, 5, -1}, KVX_DTYPE_S32, 0);
  const std::vector<int32_t> wide = {4, 1, 5, -7, -7, 1, 5, -1, -7, -7};
  EXPECT_EQ(attend_to(wide, KVX_DTYPE_S32, 5), expected);
  EXPECT_EQ(attend_to(std::vector<int64_t>(wide.begin(), wide.end()), KVX_DTYPE_S64, 5), expected);
}

TEST(Attend, RefusesATablesStrideThatOverlapsOrIsNotPacked) {
  Filled filled(KVX_FORMAT_INT8);
  Attention attention(filled.layer.layer, filled.sequence, 1);
  for (const int64_t stride : {int64_t{-1}, int64_t{2}, INT64_MAX}) {
    attention.args.block_table_stride = stride;
    EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_INVALID_ARGUMENT) << stride;
    EXPECT_THAT(kvx_last_error(), testing::HasSubstr("args.block_table_stride is"));
  }
  const std::vector<int32_t> starts = {0, 3};
  kvx_block_table_t ragged = api::ragged_table(filled.sequence.blocks, starts);
  attention.args.block_table = &ragged;
  attention.args.block_table_stride = 3;
  EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), testing::HasSubstr("that is not PACKED"));
  attention.args.block_table_stride = 0;
  EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
}

TEST(Attend, OverNoSequencesIsANoOp) {
  Filled filled(KVX_FORMAT_INT8);
  Attention attention(filled.layer.layer, filled.sequence, 1);
  kvx_block_table_t table = filled.sequence.table;
  kvx_seq_lens_t lengths = filled.sequence.seq_lens;
  table.seq_count = table.indices_count = lengths.seq_count = 0;
  attention.args.block_table = &table;
  attention.args.seq_lens = &lengths;
  EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(attention.out, std::vector<float>(attention.out.size()));
}

}  // namespace
}  // namespace kvx::api_test
