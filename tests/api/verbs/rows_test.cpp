// The verbs of 1.2 over callers' memory: append, gather, copy_blocks, transcode; and bad input.
#include <gtest/gtest.h>

#include "format/list.hpp"
#include "tests/api/caller_layer.hpp"

namespace kvx::api_test {
namespace {

TEST(Append, AndGatherGiveBackEveryRowOfEveryFormat) {
  for (const format::Facts* facts : format::kRowFacts) {
    const auto number = static_cast<uint32_t>(facts->id) + 1;
    SCOPED_TRACE(facts->name);
    Filled filled(static_cast<kvx_format_t>(number));
    ASSERT_EQ(filled.status, KVX_STATUS_OK) << kvx_last_error();
    std::vector<float> k(filled.k.size());
    std::vector<float> v(filled.v.size());
    ASSERT_EQ(gather_rows(filled.layer.layer, filled.sequence, k, v), KVX_STATUS_OK)
        << kvx_last_error();
    // Rows reach 1.5; half a step of four bits is about a seventh of that, or less.
    EXPECT_LT(largest_difference(k, filled.k), 0.3);
    EXPECT_LT(largest_difference(v, filled.v), 0.3);
    if (number == KVX_FORMAT_F32) {
      EXPECT_EQ(k, filled.k);
    }
  }
}

TEST(Append, RefusesSlotsBeyondTheLayerOrCountsThem) {
  Filled filled(KVX_FORMAT_INT8);
  const std::vector<uint8_t> before = filled.layer.memory;
  const std::vector<int64_t> slots = {0, 48, -7};
  EXPECT_EQ(append_rows(filled.layer.layer, filled.k, filled.v, slots), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(filled.layer.memory, before);

  const std::vector<int32_t> slots32 = {0, 48, -7};
  const kvx_rows_t k = api::rows(filled.k.data(), KVX_DTYPE_F32);
  const kvx_rows_t v = api::rows(filled.v.data(), KVX_DTYPE_F32);
  uint64_t beyond = 5;
  auto args = sized<kvx_append_args_t>();
  args.layer = &filled.layer.layer;
  args.k = &k;
  args.v = &v;
  args.slot_dtype = KVX_DTYPE_S32;
  args.slots = slots32.data();
  args.num_tokens = 3;
  args.out_of_range_slots = &beyond;
  EXPECT_EQ(kvx_append(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(beyond, 6u);
  EXPECT_NE(filled.layer.memory, before);
}

TEST(Append, WithATransformIsUndoneByGather) {
  Filled filled(KVX_FORMAT_F32);
  std::vector<float> mean(64);
  std::vector<float> factor(64);
  for (size_t i = 0; i < mean.size(); ++i) {
    mean[i] = 0.1f * static_cast<float>(i);
    factor[i] = 0.5f + 0.01f * static_cast<float>(i);
  }
  auto transform = sized<kvx_transform_t>();
  transform.flags = KVX_TRANSFORM_HADAMARD;
  transform.mean = mean.data();
  transform.factor = factor.data();
  kvx_layer_t layer = filled.layer.layer;
  layer.k_transform = &transform;
  ASSERT_EQ(append_rows(layer, filled.k, filled.v, slots_of(filled.sequence, 8)), KVX_STATUS_OK)
      << kvx_last_error();
  std::vector<float> k(filled.k.size());
  std::vector<float> v(filled.v.size());
  ASSERT_EQ(gather_rows(layer, filled.sequence, k, v), KVX_STATUS_OK);
  EXPECT_LT(largest_difference(k, filled.k), 1e-5);
  ASSERT_EQ(gather_rows(filled.layer.layer, filled.sequence, k, v), KVX_STATUS_OK);
  EXPECT_GT(largest_difference(k, filled.k), 0.1) << "the stored rows are transformed";
  factor[3] = 0;
  EXPECT_EQ(append_rows(layer, filled.k, filled.v, slots_of(filled.sequence, 8)),
            KVX_STATUS_INVALID_ARGUMENT);
}

TEST(Append, ReadsGivenScalesAndRefusesThoseThatAreNone) {
  const kvx_format_spec_t spec = format_spec(KVX_FORMAT_FP8_E4M3, KVX_SCALE_SOURCE_GIVEN);
  std::vector<uint8_t> codes(6 * 8 * 2 * 32);
  std::vector<float> scales = {0.5f, 0.25f};  // a head each
  auto side = sized<kvx_side_t>();
  side.head_dim = 32;
  side.spec = &spec;
  side.codes = codes.data();
  side.code_block_stride = 8 * 2 * 32;  // NHD
  side.code_token_stride = 2 * 32;
  side.code_head_stride = 32;
  side.scales = scales.data();
  side.scale_head_stride = 4;
  auto run = sized<kvx_head_run_t>();
  run.num_heads = 2;
  run.k = &side;
  const kvx_head_run_t* runs = &run;
  auto layer = sized<kvx_layer_t>();
  layer.block_size = 8;
  layer.num_blocks = 6;
  layer.num_kv_heads = 2;
  layer.num_runs = 1;
  layer.runs = &runs;
  std::vector<float> rows(64, 2.0f);
  ASSERT_EQ(append_rows(layer, rows, rows, {9}), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(codes[(8 + 1) * 64], 0x48);       // 2 / 0.5 = 4 in E4M3
  EXPECT_EQ(codes[(8 + 1) * 64 + 32], 0x50);  // 2 / 0.25 = 8
  const kvx_rows_t k_rows = api::rows(rows.data(), KVX_DTYPE_F32);
  const int64_t slot = 9;
  auto args = sized<kvx_append_args_t>();
  args.layer = &layer;
  args.k = args.v = &k_rows;
  args.slot_dtype = KVX_DTYPE_S64;
  args.slots = &slot;
  args.num_tokens = 1;
  EXPECT_EQ(kvx_append(&args, nullptr), KVX_STATUS_INVALID_ARGUMENT) << "there is no V to write";
  for (const float bad : {0.0f, -1.0f, NAN, INFINITY}) {
    scales[1] = bad;
    EXPECT_EQ(append_rows(layer, rows, rows, {9}), KVX_STATUS_INVALID_ARGUMENT) << bad;
  }
}

TEST(Gather, TakesRangesOfTokens) {
  Filled filled(KVX_FORMAT_F32);
  const std::vector<int32_t> sequences = {0, 0};
  const std::vector<int64_t> first_tokens = {9, 0};
  const std::vector<int64_t> num_tokens = {2, 1};
  const std::vector<int64_t> first_rows = {1, 0};
  std::vector<float> k(3 * 64, -9.0f);
  const kvx_rows_t rows = api::rows(k.data(), KVX_DTYPE_F32);
  kvx_gather_args_t args = gather_args(filled.layer.layer, filled.sequence, rows);
  args.num_ranges = 2;
  args.sequences = sequences.data();
  args.first_tokens = first_tokens.data();
  args.num_tokens = num_tokens.data();
  args.first_rows = first_rows.data();
  ASSERT_EQ(kvx_gather(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  std::vector<float> expected(filled.k.begin(), filled.k.begin() + 64);
  expected.insert(expected.end(), filled.k.begin() + 9 * 64, filled.k.begin() + 11 * 64);
  EXPECT_EQ(k, expected);
  const std::vector<int64_t> too_many = {2, 22};
  args.num_tokens = too_many.data();
  EXPECT_EQ(kvx_gather(&args, nullptr), KVX_STATUS_OUT_OF_RANGE);
}

TEST(Rows, AStrideThatIsLeftOutIsTheDenseOne) {
  // Rows of a buffer that has more behind each token's.
  constexpr int64_t kWidth = 2 * 32 + 40;
  Filled filled(KVX_FORMAT_F32);
  std::vector<float> with_gaps(kTokens * kWidth, -9.0f);
  kvx_rows_t rows = api::rows(with_gaps.data(), KVX_DTYPE_F32);
  rows.token_stride = kWidth;
  kvx_gather_args_t args = gather_args(filled.layer.layer, filled.sequence, rows);
  ASSERT_EQ(kvx_gather(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  for (int64_t t = 0; t < kTokens; ++t) {
    EXPECT_TRUE(std::equal(filled.k.begin() + t * 64, filled.k.begin() + (t + 1) * 64,
                           with_gaps.begin() + t * kWidth));
    EXPECT_EQ(with_gaps[t * kWidth + 64], -9.0f);
  }
  rows.token_stride = 0;
  rows.head_stride = INT64_MAX;
  EXPECT_EQ(kvx_gather(&args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(Gather, WritesNoRowBehindTheOutputsLast) {
  Filled filled(KVX_FORMAT_F32);
  std::vector<float> k(filled.k.size(), -9.0f);
  const std::vector<float> untouched = k;
  const kvx_rows_t rows = api::rows(k.data(), KVX_DTYPE_F32);
  kvx_gather_args_t args = gather_args(filled.layer.layer, filled.sequence, rows);
  args.num_rows = kTokens - 1;
  EXPECT_EQ(kvx_gather(&args, nullptr), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_NE(std::string(kvx_last_error()).find("expected rows in [0, 20)"), std::string::npos)
      << kvx_last_error();
  EXPECT_EQ(k, untouched);
  args.num_rows = kTokens;
  ASSERT_EQ(kvx_gather(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(k, filled.k);
}

TEST(Runs, OfHeadsStoreEachHeadInItsOwnFormat) {
  // Head 0 in int8 pages, head 1 as f32 in memory of its own.
  const Geometry one_head = {.num_kv_heads = 1};
  PagedLayer first(one_head, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT8));
  PagedLayer second(one_head, in_page(KVX_FORMAT_F32), in_page(KVX_FORMAT_F32));
  const kvx_head_run_t* runs[] = {&first.run, &second.run};
  auto layer = sized<kvx_layer_t>();
  layer.block_size = 8;
  layer.num_blocks = 6;
  layer.num_kv_heads = 2;
  layer.num_runs = 2;
  layer.runs = runs;
  const OneSequence sequence({4, 1, 5}, kTokens);
  const std::vector<float> rows = test_rows(kTokens, 2, 32, 0.3f);
  ASSERT_EQ(append_rows(layer, rows, rows, slots_of(sequence, 8)), KVX_STATUS_OK)
      << kvx_last_error();
  std::vector<float> k(rows.size());
  std::vector<float> v(rows.size());
  ASSERT_EQ(gather_rows(layer, sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
  double of_int8 = 0;
  double of_f32 = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    double& largest = i / 32 % 2 == 0 ? of_int8 : of_f32;
    largest = std::max(largest, std::fabs(static_cast<double>(k[i]) - rows[i]));
  }
  EXPECT_EQ(of_f32, 0);
  EXPECT_GT(of_int8, 0);
  EXPECT_LT(of_int8, 0.01);
  layer.num_kv_heads = 3;  // the runs have two
  EXPECT_EQ(append_rows(layer, rows, rows, {0}), KVX_STATUS_INVALID_ARGUMENT);
}

// --- copies ---

TEST(CopyBlocks, CopiesAsStoredAndConvertsWhereFormatsDiffer) {
  Filled from(KVX_FORMAT_INT8);
  PagedLayer same({}, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT8));
  PagedLayer other({}, in_page(KVX_FORMAT_F32), in_page(KVX_FORMAT_F32));
  const std::vector<int64_t> from_blocks = {4, 1};
  const std::vector<int64_t> to_blocks = {0, 3};
  auto args = sized<kvx_copy_args_t>();
  args.num_copies = 2;
  args.from = &from.layer.layer;
  args.from_blocks = from_blocks.data();
  args.to_blocks = to_blocks.data();
  const OneSequence moved({0, 3}, 16);
  std::vector<float> k(16 * 64);
  std::vector<float> v(16 * 64);
  std::vector<float> k_from(from.k.size());
  std::vector<float> v_from(from.v.size());
  ASSERT_EQ(gather_rows(from.layer.layer, from.sequence, k_from, v_from), KVX_STATUS_OK);
  k_from.resize(k.size());
  for (PagedLayer* to : {&same, &other}) {
    args.to = &to->layer;
    ASSERT_EQ(kvx_copy_blocks(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    ASSERT_EQ(gather_rows(to->layer, moved, k, v), KVX_STATUS_OK);
    EXPECT_EQ(k, k_from);
  }
  const std::vector<int64_t> bad = {0, 6};
  args.to_blocks = bad.data();
  EXPECT_EQ(kvx_copy_blocks(&args, nullptr), KVX_STATUS_OUT_OF_RANGE);
  args.to_blocks = nullptr;
  EXPECT_EQ(kvx_copy_blocks(&args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(Transcode, MovesTokensToAnotherFormatBlockSizeAndOrder) {
  Filled from(KVX_FORMAT_INT8);
  std::vector<float> k_cache(3 * 16 * 64);
  std::vector<float> v_cache(3 * 16 * 64);
  kvx_cache_desc_t cache =
      api::nhd_cache(k_cache.data(), v_cache.data(), KVX_DTYPE_F32, {3, 16, 2, 32});
  cache.k = api::tensor(k_cache.data(), KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_HND, {3, 2, 16, 32});
  cache.v = api::tensor(v_cache.data(), KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_HND, {3, 2, 16, 32});
  auto to = sized<kvx_layer_t>();
  to.cache = &cache;
  const OneSequence moved({2, 0}, kTokens);
  const std::vector<int64_t> from_slots = slots_of(from.sequence, 8);
  std::vector<int64_t> to_slots = slots_of(moved, 16);
  auto args = sized<kvx_transcode_args_t>();
  args.slot_dtype = KVX_DTYPE_S64;
  args.from = &from.layer.layer;
  args.to = &to;
  args.num_tokens = kTokens;
  args.from_slots = from_slots.data();
  args.to_slots = to_slots.data();
  ASSERT_EQ(kvx_transcode(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  std::vector<float> k(from.k.size());
  std::vector<float> v(from.v.size());
  std::vector<float> k_from(from.k.size());
  std::vector<float> v_from(from.v.size());
  ASSERT_EQ(gather_rows(to, moved, k, v), KVX_STATUS_OK);
  ASSERT_EQ(gather_rows(from.layer.layer, from.sequence, k_from, v_from), KVX_STATUS_OK);
  EXPECT_EQ(k, k_from);
  EXPECT_EQ(v, v_from);

  const std::vector<float> before = k_cache;
  to_slots[3] = 48;
  EXPECT_EQ(kvx_transcode(&args, nullptr), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(k_cache, before);
}

// --- bad input ---

TEST(Verbs, RefuseEveryPointerThatIsNull) {
  Filled filled(KVX_FORMAT_INT8);
  Attention attention(filled.layer.layer, filled.sequence, 1);
  EXPECT_EQ(kvx_append(nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_gather(nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_attend(nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_attend_workspace(nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_attend_workspace(&attention.args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_copy_blocks(nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_transcode(nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);

  const auto refused = [&](auto change) {
    kvx_attend_args_t args = attention.args;
    change(args);
    EXPECT_EQ(kvx_attend(&args, nullptr), KVX_STATUS_INVALID_ARGUMENT) << kvx_last_error();
  };
  refused([](auto& args) { args.layer = nullptr; });
  refused([](auto& args) { args.block_table = nullptr; });
  refused([](auto& args) { args.seq_lens = nullptr; });
  refused([](auto& args) { args.q = nullptr; });
  refused([](auto& args) { args.out = nullptr; });
  refused([](auto& args) { args.num_q_heads = 3; });
  refused([](auto& args) { args.num_q_heads = UINT32_MAX; });
  refused([](auto& args) { args.window = UINT32_MAX; });
  refused([](auto& args) { args.softcap = -1; });
  refused([](auto& args) { args.softmax_scale = NAN; });
  refused([](auto& args) { args.reserved = 1; });
  refused([](auto& args) { args.reserved_2 = 1; });
  refused([](auto& args) { args.reserved_3 = 1; });
  refused([](auto& args) { args.precision = 2; });
  refused([](auto& args) { args.workspace_bytes = 1; });
}

TEST(Verbs, RefuseRowsThatLieOverTheLayer) {
  Filled filled(KVX_FORMAT_F32);
  const std::vector<uint8_t> before = filled.layer.memory;
  const kvx_rows_t inside = api::rows(filled.layer.memory.data() + 64, KVX_DTYPE_F32);
  const kvx_rows_t outside = api::rows(filled.k.data(), KVX_DTYPE_F32);
  const int64_t slot = 0;
  auto append = sized<kvx_append_args_t>();
  append.layer = &filled.layer.layer;
  append.k = &outside;
  append.v = &inside;
  append.slot_dtype = KVX_DTYPE_S64;
  append.slots = &slot;
  append.num_tokens = 1;
  EXPECT_EQ(kvx_append(&append, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  const kvx_gather_args_t gather = gather_args(filled.layer.layer, filled.sequence, inside);
  EXPECT_EQ(kvx_gather(&gather, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  Attention attention(filled.layer.layer, filled.sequence, 1);
  attention.args.out = &inside;
  EXPECT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(filled.layer.memory, before);
}

TEST(Verbs, RefuseLayersThatCannotBe) {
  const auto refused = [](auto change, kvx_status_t status = KVX_STATUS_INVALID_ARGUMENT) {
    Filled filled(KVX_FORMAT_INT8);
    const std::vector<uint8_t> before = filled.layer.memory;
    change(filled.layer);
    EXPECT_EQ(append_rows(filled.layer.layer, filled.k, filled.v, {0}), status) << kvx_last_error();
    EXPECT_EQ(filled.layer.memory, before);
  };
  refused([](auto& l) { l.layer.size = 4; });
  refused([](auto& l) { l.layer.num_blocks = 0; });
  refused([](auto& l) { l.layer.num_blocks = INT64_MAX; });
  refused([](auto& l) { l.layer.num_blocks = INT64_MIN; });
  refused([](auto& l) { l.layer.block_size = 0; });
  refused([](auto& l) { l.layer.block_size = UINT32_MAX; });
  refused([](auto& l) { l.layer.num_kv_heads = 0; });
  refused([](auto& l) { l.layer.num_kv_heads = 3; });
  refused([](auto& l) { l.layer.num_runs = 0; });
  refused([](auto& l) { l.layer.runs = nullptr; });
  refused([](auto& l) { l.runs = nullptr; });
  refused([](auto& l) { l.run.num_heads = 3; });
  refused([](auto& l) { l.run.k = nullptr; });
  refused([](auto& l) { l.k.spec = nullptr; });
  refused([](auto& l) { l.k.head_dim = 0; });
  refused([](auto& l) { l.k.head_dim = UINT32_MAX; });
  refused([](auto& l) { l.k.codes = nullptr; });
  refused([](auto& l) { l.v.scales = nullptr; });
  refused([](auto& l) { l.v.scale_head_stride = -4; });
  refused([](auto& l) { l.v.head_dim = 64; }, KVX_STATUS_UNSUPPORTED);  // rows over each other
  refused([](auto& l) { l.k.code_token_stride = 1; }, KVX_STATUS_UNSUPPORTED);
  refused([](auto& l) { l.k.code_block_stride = INT64_MAX; });
  refused([](auto& l) { l.v.scale_token_stride = 0; }, KVX_STATUS_UNSUPPORTED);
  refused([](auto& l) { l.k.tensor_scales = reinterpret_cast<const float*>(&l); });
  refused([](auto& l) { l.layer.size = UINT32_MAX; }, KVX_STATUS_INCOMPATIBLE);
}

}  // namespace
}  // namespace kvx::api_test
