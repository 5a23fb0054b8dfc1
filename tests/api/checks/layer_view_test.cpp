// Rows that are not contiguous or have no V of their own: HND_PACKED and code_fragment_bytes in
// every verb, and V as the beginning of K's rows (latent caches).
#include <gmock/gmock.h>

#include <cstring>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::layer_view_test {
namespace {

using testing::HasSubstr;

// Geometry{}'s blocks as float16 in [block, head, dim / pack, token, pack], V with pack 1, as
// paged-attention kernels of engines keep them.
struct PackedCache {
  explicit PackedCache(int64_t pack) {
    cache = api::nhd_cache(k.data(), v.data(), KVX_DTYPE_F16, {6, 8, 2, 32});
    cache.k = api::tensor(k.data(), KVX_DTYPE_F16, KVX_LAYOUT_BLOCK_HND_PACKED,
                          {6, 2, 32 / pack, 8, pack});
    cache.v = api::tensor(v.data(), KVX_DTYPE_F16, KVX_LAYOUT_BLOCK_HND_PACKED, {6, 2, 32, 8, 1});
    layer.cache = &cache;
  }
  PackedCache(const PackedCache&) = delete;

  std::vector<uint16_t> k = std::vector<uint16_t>(6 * 8 * 64, 0xABAB);
  std::vector<uint16_t> v = std::vector<uint16_t>(6 * 8 * 64, 0xABAB);
  kvx_cache_desc_t cache;
  kvx_layer_t layer = sized<kvx_layer_t>();
};

struct Rows {
  std::vector<float> k = std::vector<float>(kTokens * 64);
  std::vector<float> v = std::vector<float>(kTokens * 64);
};

Rows gathered(const kvx_layer_t& layer, const OneSequence& sequence) {
  Rows rows;
  EXPECT_EQ(gather_rows(layer, sequence, rows.k, rows.v), KVX_STATUS_OK) << kvx_last_error();
  return rows;
}

TEST(PackedRows, LieWhereTheLayoutSays) {
  PackedCache packed(8);
  Filled filled(KVX_FORMAT_F16);
  ASSERT_EQ(append_rows(packed.layer, filled.k, filled.v, slots_of(filled.sequence, 8)),
            KVX_STATUS_OK)
      << kvx_last_error();
  // What the v1 call writes there is the same.
  PackedCache expected(8);
  std::vector<int32_t> slots;
  for (const int64_t slot : slots_of(filled.sequence, 8)) {
    slots.push_back(static_cast<int32_t>(slot));
  }
  auto write = sized<kvx_write_desc_t>();
  write.io = sized<kvx_kv_io_desc_t>();
  write.io.key = api::tensor(filled.k.data(), KVX_DTYPE_F32, KVX_LAYOUT_INVALID, {kTokens, 2, 32});
  write.io.value =
      api::tensor(filled.v.data(), KVX_DTYPE_F32, KVX_LAYOUT_INVALID, {kTokens, 2, 32});
  write.io.num_tokens = kTokens;
  write.io.num_kv_heads = 2;
  write.io.head_dim = 32;
  write.slots = sized<kvx_slot_mapping_t>();
  write.slots.dtype = KVX_DTYPE_S32;
  write.slots.token_count = kTokens;
  write.slots.invalid_slot = -1;
  write.slots.slots = slots.data();
  ASSERT_EQ(kvx_write_kv(&expected.cache, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(packed.k, expected.k);
  EXPECT_EQ(packed.v, expected.v);
}

TEST(PackedRows, AreReadByEveryVerbAsContiguousOnes) {
  for (const int64_t pack : {1, 8, 32}) {
    SCOPED_TRACE(pack);
    Filled filled(KVX_FORMAT_F16);
    PackedCache packed(pack);
    ASSERT_EQ(append_rows(packed.layer, filled.k, filled.v, slots_of(filled.sequence, 8)),
              KVX_STATUS_OK)
        << kvx_last_error();
    const Rows expected = gathered(filled.layer.layer, filled.sequence);
    const Rows rows = gathered(packed.layer, filled.sequence);
    EXPECT_EQ(rows.k, expected.k);
    EXPECT_EQ(rows.v, expected.v);
    for (const int num_queries : {1, 5}) {
      Attention attention(packed.layer, filled.sequence, num_queries);
      ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
      EXPECT_LT(largest_difference(attention.out,
                                   plain_attention(attention.q, rows.k, rows.v, num_queries,
                                                   kTokens, kQHeads, filled.geometry)),
                2e-5);
    }
  }
}

TEST(PackedRows, GoToOtherLayersAndComeBack) {
  Filled filled(KVX_FORMAT_F16);
  PackedCache packed(8);
  const std::vector<int64_t> blocks = {4, 1, 5};
  auto copy = sized<kvx_copy_args_t>();
  copy.from = &filled.layer.layer;
  copy.to = &packed.layer;
  copy.num_copies = 3;
  copy.from_blocks = copy.to_blocks = blocks.data();
  ASSERT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(gathered(packed.layer, filled.sequence).k,
            gathered(filled.layer.layer, filled.sequence).k);

  // Rows in fragments are quantised to the bytes of contiguous rows.
  const std::vector<int64_t> slots = slots_of(filled.sequence, 8);
  const auto to_nvfp4 = [&slots](const kvx_layer_t& from) {
    Geometry geometry;
    PagedLayer target(geometry, in_page(KVX_FORMAT_NVFP4), in_page(KVX_FORMAT_INT8));
    auto args = sized<kvx_transcode_args_t>();
    args.from = &from;
    args.to = &target.layer;
    args.slot_dtype = KVX_DTYPE_S64;
    args.num_tokens = kTokens;
    args.from_slots = args.to_slots = slots.data();
    EXPECT_EQ(kvx_transcode(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    return target.memory;
  };
  EXPECT_EQ(to_nvfp4(packed.layer), to_nvfp4(filled.layer.layer));
}

// Codes of any format may lie in fragments; scales do not.
TEST(PackedRows, AreThereForQuantisedCodesToo) {
  Filled filled(KVX_FORMAT_INT8);
  const Rows expected = gathered(filled.layer.layer, filled.sequence);
  std::vector<uint8_t> codes(6 * 8 * 64);
  kvx_side_t k = filled.layer.k;
  k.codes = codes.data();  // [block, head, 2 fragments, token, 16]
  k.code_block_stride = 8 * 64;
  k.code_head_stride = 8 * 32;
  k.code_fragment_stride = 8 * 16;
  k.code_fragment_bytes = 16;
  k.code_token_stride = 16;
  filled.layer.run.k = &k;
  ASSERT_EQ(append_rows(filled.layer.layer, filled.k, filled.v, slots_of(filled.sequence, 8)),
            KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(gathered(filled.layer.layer, filled.sequence).k, expected.k);
  k.code_fragment_bytes = 5;
  EXPECT_EQ(append_rows(filled.layer.layer, filled.k, filled.v, {0}), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("code_fragment_bytes is 5; expected a divisor"));
  k.code_fragment_bytes = 16;
  k.code_fragment_stride = 8;  // over each other
  EXPECT_EQ(append_rows(filled.layer.layer, filled.k, filled.v, {0}), KVX_STATUS_UNSUPPORTED);
}

// ---- V as the beginning of K's rows ----

// A latent cache: one KV head, K of 96 numbers whose first 64 are V.
struct LatentLayer : PrefixLayer {
  explicit LatentLayer(kvx_format_t format) : PrefixLayer(64), spec(in_page(format)) {
    page.block_size = 8;
    page.k_head_dim = 96;
    page.k_spec = &spec;
    uint64_t bytes = 0;
    EXPECT_EQ(kvx_page_bytes_per_token(&page, &bytes), KVX_STATUS_OK) << kvx_last_error();
    memory.resize(6 * 8 * bytes);
    EXPECT_EQ(kvx_describe_pages(&page, memory.data(), 1, &k, nullptr), KVX_STATUS_OK);
    layer.block_size = 8;
    layer.num_blocks = 6;
  }

  kvx_format_spec_t spec;
  kvx_page_desc_t page = sized<kvx_page_desc_t>();
  std::vector<uint8_t> memory;
};

constexpr kvx_format_t kLatentFormats[] = {KVX_FORMAT_BF16, KVX_FORMAT_FP8_E4M3,
                                           KVX_FORMAT_INT8, KVX_FORMAT_INT8_AFFINE,
                                           KVX_FORMAT_INT4, KVX_FORMAT_NVFP4};

TEST(PrefixOfK, IsWhatGatherGivesAsVAndWhatAttendWeighs) {
  const OneSequence sequence({4, 1, 5}, kTokens);
  const std::vector<float> rows = test_rows(kTokens, 1, 96, 0.3f);
  for (const kvx_format_t format : kLatentFormats) {
    SCOPED_TRACE(format);
    LatentLayer latent(format);
    ASSERT_EQ(latent.append(rows, slots_of(sequence, 8)), KVX_STATUS_OK) << kvx_last_error();
    std::vector<float> k(kTokens * 96);
    std::vector<float> v(kTokens * 64);
    ASSERT_EQ(gather_rows(latent.layer, sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_LT(largest_difference(k, rows), 0.3);
    std::vector<float> prefix;
    for (int t = 0; t < kTokens; ++t) {
      prefix.insert(prefix.end(), k.begin() + t * 96, k.begin() + t * 96 + 64);
    }
    EXPECT_EQ(v, prefix);

    const std::vector<float> q = test_rows(1, kQHeads, 96, 4.2f);
    std::vector<float> out(kQHeads * 64);
    const kvx_rows_t q_rows = api::rows(q.data(), KVX_DTYPE_F32);
    const kvx_rows_t out_rows = api::rows(out.data(), KVX_DTYPE_F32);
    auto args = sized<kvx_attend_args_t>();
    args.layer = &latent.layer;
    args.block_table = &sequence.table;
    args.seq_lens = &sequence.seq_lens;
    args.num_q_heads = kQHeads;
    args.q = &q_rows;
    args.out = &out_rows;
    ASSERT_EQ(kvx_attend(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    // plain_attention takes K and V of one width: with K's own rows as values, its output begins
    // with what the prefix gives.
    Geometry geometry;
    geometry.head_dim = 96;
    geometry.num_kv_heads = 1;
    const std::vector<float> whole = plain_attention(q, k, k, 1, kTokens, kQHeads, geometry);
    std::vector<float> expected;
    for (int h = 0; h < kQHeads; ++h) {
      expected.insert(expected.end(), whole.begin() + h * 96, whole.begin() + h * 96 + 64);
    }
    // gather computes affine numbers in their parameters' 16 bits, attention in 32.
    EXPECT_LT(largest_difference(out, expected), format == KVX_FORMAT_INT8_AFFINE ? 2e-3 : 2e-5);
  }
}

TEST(PrefixOfK, IsCopiedAndTranscodedWithItsK) {
  const OneSequence sequence({4, 1, 5}, kTokens);
  const std::vector<int64_t> slots = slots_of(sequence, 8);
  LatentLayer from(KVX_FORMAT_BF16);
  ASSERT_EQ(from.append(test_rows(kTokens, 1, 96, 0.3f), slots), KVX_STATUS_OK);
  LatentLayer appended(KVX_FORMAT_INT8);
  std::vector<float> k(kTokens * 96);
  std::vector<float> v(kTokens * 64);
  ASSERT_EQ(gather_rows(from.layer, sequence, k, v), KVX_STATUS_OK);
  ASSERT_EQ(appended.append(k, slots), KVX_STATUS_OK);

  LatentLayer transcoded(KVX_FORMAT_INT8);
  auto args = sized<kvx_transcode_args_t>();
  args.from = &from.layer;
  args.to = &transcoded.layer;
  args.slot_dtype = KVX_DTYPE_S64;
  args.num_tokens = kTokens;
  args.from_slots = args.to_slots = slots.data();
  ASSERT_EQ(kvx_transcode(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(transcoded.memory, appended.memory);

  LatentLayer copied(KVX_FORMAT_INT8);
  const std::vector<int64_t> blocks = {4, 1, 5};
  auto copy = sized<kvx_copy_args_t>();
  copy.from = &transcoded.layer;
  copy.to = &copied.layer;
  copy.num_copies = 3;
  copy.from_blocks = copy.to_blocks = blocks.data();
  ASSERT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(copied.memory, appended.memory);
}

TEST(PrefixOfK, RefusesWhatItCannotMean) {
  LatentLayer latent(KVX_FORMAT_INT8);
  const std::vector<float> rows = test_rows(1, 1, 96, 0.3f);
  const auto status = [&] { return latent.append(rows, {3}); };
  ASSERT_EQ(status(), KVX_STATUS_OK) << kvx_last_error();

  latent.v.head_dim = 97;
  EXPECT_EQ(status(), KVX_STATUS_INVALID_ARGUMENT);
  latent.v.head_dim = 64;
  latent.v.codes = latent.memory.data();
  EXPECT_EQ(status(), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("describes memory"));
  latent.v.codes = nullptr;
  latent.v.flags = 1u << 31;  // means nothing
  EXPECT_EQ(status(), KVX_STATUS_INCOMPATIBLE);
  latent.v.flags = KVX_SIDE_PREFIX_OF_K;
  latent.k.flags = KVX_SIDE_PREFIX_OF_K;
  EXPECT_EQ(status(), KVX_STATUS_INCOMPATIBLE);
  latent.k.flags = 0;

  auto transform = sized<kvx_transform_t>();
  transform.flags = KVX_TRANSFORM_HADAMARD;
  latent.layer.k_transform = &transform;
  EXPECT_EQ(status(), KVX_STATUS_UNSUPPORTED);
  latent.layer.k_transform = nullptr;

  const kvx_rows_t row = api::rows(rows.data(), KVX_DTYPE_F32);
  const int64_t slot = 3;
  auto args = sized<kvx_append_args_t>();
  args.layer = &latent.layer;
  args.k = args.v = &row;
  args.slot_dtype = KVX_DTYPE_S64;
  args.slots = &slot;
  args.num_tokens = 1;
  EXPECT_EQ(kvx_append(&args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("args.v is set"));
}

TEST(PrefixOfK, TakesNoVThatIsStoredApart) {
  Geometry geometry;
  geometry.num_kv_heads = 1;
  geometry.head_dim = 96;
  PagedLayer apart(geometry, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT8));
  LatentLayer latent(KVX_FORMAT_INT8);
  latent.v.head_dim = 96;
  const int64_t block = 0;
  auto copy = sized<kvx_copy_args_t>();
  copy.from = &apart.layer;
  copy.to = &latent.layer;
  copy.num_copies = 1;
  copy.from_blocks = copy.to_blocks = &block;
  EXPECT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_UNSUPPORTED);
  copy.from = &latent.layer;
  copy.to = &apart.layer;
  EXPECT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_OK) << kvx_last_error();
}

// A program compiled against the 1.2 without flags passes 96 bytes.
TEST(DescribePages, FillsAnOlderCallersStruct) {
  LatentLayer latent(KVX_FORMAT_INT8);
  kvx_side_t side;
  memset(&side, 0xEE, sizeof side);
  side.size = 96;
  ASSERT_EQ(kvx_describe_pages(&latent.page, latent.memory.data(), 1, &side, nullptr),
            KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(side.size, 96u);
  EXPECT_EQ(side.flags, 0xEEEEEEEEu);
  side.size = 95;
  EXPECT_EQ(kvx_describe_pages(&latent.page, latent.memory.data(), 1, &side, nullptr),
            KVX_STATUS_INVALID_ARGUMENT);
}

// Only a GPU's kernels read interleaved codes, and the check needs no GPU.
TEST(Interleaved, AreRefusedWhereNoKernelReadsThem) {
  const Geometry geometry{2, 64, 1, 64};
  const auto append_to = [](const kvx_layer_t& layer) {
    return append_rows(layer, test_rows(1, 1, 64, 0.1f), test_rows(1, 1, 64, 0.2f), {0});
  };
  PagedLayer pages(geometry, in_page(KVX_FORMAT_NVFP4), in_page(KVX_FORMAT_NVFP4));
  pages.k.flags = KVX_SIDE_INTERLEAVED_ORDER;
  EXPECT_EQ(append_to(pages.layer), KVX_STATUS_UNSUPPORTED);
  EXPECT_THAT(kvx_last_error(),
              HasSubstr("runs[0].k has codes in interleaved order and lies on the host"));
  uint32_t prefers = 7;
  EXPECT_EQ(kvx_attend_prefers_interleaved_order(&pages.layer, &prefers), KVX_STATUS_UNSUPPORTED);
  pages.k.flags = 0;
  EXPECT_EQ(kvx_attend_prefers_interleaved_order(&pages.layer, &prefers), KVX_STATUS_UNSUPPORTED);
  EXPECT_EQ(kvx_attend_prefers_interleaved_order(&pages.layer, nullptr),
            KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(prefers, 7u);

  const auto refused = [&](PagedLayer& layer, kvx_status_t status, const char* words) {
    layer.k.flags = KVX_SIDE_INTERLEAVED_ORDER;
    EXPECT_EQ(append_to(layer.layer), status);
    EXPECT_THAT(kvx_last_error(), HasSubstr(words));
  };
  PagedLayer integers(geometry, in_page(KVX_FORMAT_INT4), in_page(KVX_FORMAT_INT4));
  refused(integers, KVX_STATUS_INVALID_ARGUMENT,
          "has codes in interleaved order, which int4 does not have");
  PagedLayer shared(geometry, in_page(KVX_FORMAT_NVFP4), in_page(KVX_FORMAT_NVFP4));
  shared.k_spec.scale_source = KVX_SCALE_SOURCE_PAGE_SHARED;
  shared.k.scale_token_stride = 0;
  refused(shared, KVX_STATUS_UNSUPPORTED, "page-shared scales");
  PagedLayer fragments(geometry, in_page(KVX_FORMAT_NVFP4), in_page(KVX_FORMAT_NVFP4));
  fragments.k.code_fragment_bytes = 16;
  fragments.k.code_fragment_stride = 16;
  refused(fragments, KVX_STATUS_UNSUPPORTED, "rows in fragments");
}

TEST(Q4_0Blocks, AreRefusedWhereTheyAreNot) {
  const Geometry geometry{2, 64, 1, 64};
  const auto refused = [&](kvx_format_spec_t spec, uint32_t flags, uint32_t fragment_bytes,
                           kvx_status_t status, const char* words) {
    PagedLayer pages(geometry, spec, spec);
    pages.k.flags = flags;
    pages.k.code_fragment_bytes = fragment_bytes;
    pages.k.code_fragment_stride = fragment_bytes;
    EXPECT_EQ(append_rows(pages.layer, test_rows(1, 1, 64, 0.1f), test_rows(1, 1, 64, 0.2f), {0}),
              status);
    EXPECT_THAT(kvx_last_error(), HasSubstr(words));
  };
  kvx_format_spec_t int4 = in_page(KVX_FORMAT_INT4);
  int4.group_size = 32;
  int4.scale_type = KVX_SCALE_TYPE_F16;
  constexpr uint32_t kFlag = KVX_SIDE_Q4_0_BLOCKS;
  refused(int4, kFlag, 32, KVX_STATUS_INVALID_ARGUMENT,
          "q4_0 blocks, head_dim 64 and code_fragment_bytes 32; expected a multiple of 32 and 16");
  refused(int4, kFlag | KVX_SIDE_INTERLEAVED_ORDER, 16, KVX_STATUS_INVALID_ARGUMENT,
          "two orders of codes");
  kvx_format_spec_t other = int4;
  other.group_size = 64;
  refused(other, kFlag, 16, KVX_STATUS_INVALID_ARGUMENT,
          "q4_0 blocks in int4 with groups of 64 and computed f16 scales; expected int4");
  other = int4;
  other.scale_type = KVX_SCALE_TYPE_F32;
  refused(other, kFlag, 16, KVX_STATUS_INVALID_ARGUMENT, "computed f32 scales; expected int4");
  refused(in_page(KVX_FORMAT_INT8), kFlag, 16, KVX_STATUS_INVALID_ARGUMENT, "q4_0 blocks in int8");
}

}  // namespace
}  // namespace kvx::api_test::layer_view_test
