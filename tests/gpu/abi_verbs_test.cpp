// The verbs of 1.2 on layers in device memory: the host's bytes and rows, and the host's attention.
#include "tests/api/caller_layer.hpp"
#include "tests/gpu/device_layer.hpp"
#include "tests/support/compare_bytes.hpp"

namespace kvx::tests {
namespace {

using api_test::Filled;
using api_test::Geometry;
using api_test::PagedLayer;
using api_test::sized;

class GpuAbiVerbs : public GpuTest {
 protected:
  // Rows of `filled` to its slots and `more`, on the device.
  kvx_status_t append(DeviceLayer& device, Filled& filled, const std::vector<int64_t>& more = {}) {
    slots = api_test::slots_of(filled.sequence, filled.geometry.block_size);
    std::copy(more.begin(), more.end(), slots.begin());
    return append(device, filled.k, filled.v);
  }
  // Rows to `slots`.
  kvx_status_t append(DeviceLayer& device, std::vector<float>& k, std::vector<float>& v) {
    const kvx_rows_t k_rows = api::rows(device.mirror().add(k), KVX_DTYPE_F32);
    const kvx_rows_t v_rows = api::rows(device.mirror().add(v), KVX_DTYPE_F32);
    auto args = sized<kvx_append_args_t>();
    args.layer = &device.layer;
    args.k = &k_rows;
    args.v = &v_rows;
    args.slot_dtype = KVX_DTYPE_S64;
    args.slots = device.mirror().add(slots);
    args.num_tokens = std::ssize(slots);
    return kvx_append(&args, context().stream);
  }

  // One query a sequence, head_dim 64.
  std::vector<float> attend_to(DeviceLayer& device, const api_test::OneSequence& sequence) {
    api_test::OneSequence there(sequence.blocks, sequence.lengths[0]);
    there.table.indices = device.mirror().add(there.blocks);
    there.seq_lens.lengths = device.mirror().add(there.lengths);
    return attend_on(device, there);
  }
  // table and lengths are on the device.
  std::vector<float> attend_on(DeviceLayer& device, const api_test::OneSequence& there) {
    api_test::Attention attention(device.layer, there, 1, 64);
    std::fill(attention.out.begin(), attention.out.end(), 9.0f);  // what is not written is seen
    attention.q_rows.data = device.mirror().add(attention.q);
    attention.out_rows.data = device.mirror().add(attention.out);
    attention.args.q_starts = device.mirror().add(attention.starts);
    attention.args.num_queries = 1;
    attention.args.max_q_len = 1;
    uint64_t bytes = 0;
    EXPECT_EQ(kvx_attend_workspace(&attention.args, &bytes), KVX_STATUS_OK) << kvx_last_error();
    const auto workspace = memory().allocate(static_cast<int64_t>(bytes) + 1, "workspace");
    attention.args.workspace = workspace.value().data();
    attention.args.workspace_bytes = bytes;
    EXPECT_EQ(kvx_attend(&attention.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    device.mirror().fetch(attention.out);
    return attention.out;
  }

  std::vector<int64_t> slots;
};

const kvx_format_t kSomeFormats[] = {KVX_FORMAT_F32,  KVX_FORMAT_BF16,        KVX_FORMAT_FP8_E4M3,
                                     KVX_FORMAT_INT8, KVX_FORMAT_INT4_AFFINE, KVX_FORMAT_MXFP4,
                                     KVX_FORMAT_NVFP4};

TEST_F(GpuAbiVerbs, AppendWritesTheHostsBytes) {
  for (const kvx_format_t format : kSomeFormats) {
    SCOPED_TRACE(format);
    Filled filled(format);
    ASSERT_EQ(filled.status, KVX_STATUS_OK) << kvx_last_error();
    PagedLayer pages(filled.geometry, api_test::in_page(format), api_test::in_page(format));
    DeviceLayer device(memory(), pages);
    ASSERT_EQ(append(device, filled), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    device.fetch();
    EXPECT_TRUE(same_bytes(filled.layer.memory, pages.memory));
    EXPECT_EQ(device.out_of_range(), 0u);
  }
}

TEST_F(GpuAbiVerbs, AppendSkipsAndCountsSlotsBeyondTheLayer) {
  Filled filled(KVX_FORMAT_INT8);
  PagedLayer pages(filled.geometry, api_test::in_page(KVX_FORMAT_INT8),
                   api_test::in_page(KVX_FORMAT_INT8));
  const std::vector<uint8_t> before = pages.memory;
  DeviceLayer device(memory(), pages);
  std::vector<int64_t> beyond(api_test::kTokens, 48);
  beyond[0] = INT64_MAX;
  beyond[1] = -1;
  ASSERT_EQ(append(device, filled, beyond), KVX_STATUS_OK) << kvx_last_error();
  synchronize();
  device.fetch();
  EXPECT_TRUE(same_bytes(before, pages.memory));
  EXPECT_EQ(device.out_of_range(), 2u * (api_test::kTokens - 1));  // K and V
}

// A gather of `num_ranges` with arrays, or of all sequences without.
struct DeviceGather {
  DeviceGather(DeviceLayer& device, Filled& filled, int64_t num_rows)
      : k(static_cast<size_t>(num_rows) * 64, -7.0f), v(k) {
    Mirror& mirror = device.mirror();
    k_rows = api::rows(mirror.add(k), KVX_DTYPE_F32);
    v_rows = api::rows(mirror.add(v), KVX_DTYPE_F32);
    table = filled.sequence.table;
    table.indices = mirror.add(filled.sequence.blocks);
    lengths = filled.sequence.seq_lens;
    lengths.lengths = mirror.add(filled.sequence.lengths);
    args.layer = &device.layer;
    args.block_table = &table;
    args.seq_lens = &lengths;
    args.num_ranges = 1;
    args.k = &k_rows;
    args.v = &v_rows;
  }
  std::vector<float> k;
  std::vector<float> v;
  kvx_rows_t k_rows;
  kvx_rows_t v_rows;
  kvx_block_table_t table;
  kvx_seq_lens_t lengths;
  kvx_gather_args_t args = sized<kvx_gather_args_t>();
};

TEST_F(GpuAbiVerbs, GatherReadsTheHostsRowsWholeOrByRanges) {
  for (const kvx_format_t format : kSomeFormats) {
    SCOPED_TRACE(format);
    Filled filled(format);
    std::vector<float> k(filled.k.size());
    std::vector<float> v(filled.v.size());
    ASSERT_EQ(api_test::gather_rows(filled.layer.layer, filled.sequence, k, v), KVX_STATUS_OK);
    DeviceLayer device(memory(), filled.layer);
    DeviceGather whole(device, filled, api_test::kTokens);
    ASSERT_EQ(kvx_gather(&whole.args, context().stream), KVX_STATUS_OK) << kvx_last_error();

    DeviceGather ranges(device, filled, 8);
    // The third ends beyond its sequence, the last one beyond the output.
    std::vector<int32_t> sequences = {0, 0, 0, 0};
    std::vector<int64_t> first_tokens = {6, 20, 20, 0};
    std::vector<int64_t> num_tokens = {5, 1, 2, 2};
    std::vector<int64_t> first_rows = {0, 5, 6, 6};
    ranges.args.num_ranges = 4;
    ranges.args.num_rows = 7;
    ranges.args.sequences = device.mirror().add(sequences);
    ranges.args.first_tokens = device.mirror().add(first_tokens);
    ranges.args.num_tokens = device.mirror().add(num_tokens);
    ranges.args.first_rows = device.mirror().add(first_rows);
    ASSERT_EQ(kvx_gather(&ranges.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    device.mirror().fetch(whole.k);
    device.mirror().fetch(whole.v);
    device.mirror().fetch(ranges.k);
    EXPECT_EQ(whole.k, k);
    EXPECT_EQ(whole.v, v);
    EXPECT_TRUE(std::equal(ranges.k.begin(), ranges.k.begin() + 5 * 64, k.begin() + 6 * 64));
    EXPECT_TRUE(std::equal(k.begin() + 20 * 64, k.end(), ranges.k.begin() + 5 * 64));
    EXPECT_EQ(ranges.k[6 * 64], -7.0f);
    EXPECT_EQ(ranges.k[7 * 64], -7.0f);
    EXPECT_EQ(device.out_of_range(), 2u);
  }
}

TEST_F(GpuAbiVerbs, AttendGivesTheHostsAttention) {
  for (const kvx_format_t format : kSomeFormats) {
    for (const int num_queries : {1, 5}) {
      SCOPED_TRACE(std::to_string(format) + ", queries " + std::to_string(num_queries));
      Filled filled(format);
      api_test::Attention host(filled.layer.layer, filled.sequence, num_queries);
      ASSERT_EQ(kvx_attend(&host.args, nullptr), KVX_STATUS_OK) << kvx_last_error();

      DeviceLayer device(memory(), filled.layer);
      api_test::Attention there(filled.layer.layer, filled.sequence, num_queries);
      DeviceGather described(device, filled, 1);  // for its table
      there.args.layer = &device.layer;
      there.args.block_table = &described.table;
      there.args.seq_lens = &described.lengths;
      there.q_rows.data = device.mirror().add(there.q);
      there.out_rows.data = device.mirror().add(there.out);
      there.args.q_starts = device.mirror().add(there.starts);
      there.args.num_queries = num_queries;
      there.args.max_q_len = static_cast<uint32_t>(num_queries);
      uint64_t bytes = 0;
      ASSERT_EQ(kvx_attend_workspace(&there.args, &bytes), KVX_STATUS_OK) << kvx_last_error();
      auto workspace = memory().allocate(static_cast<int64_t>(bytes) + 1, "workspace");
      ASSERT_TRUE(workspace.ok());
      there.args.workspace = workspace.value().data();
      if (bytes > 0) {
        there.args.workspace_bytes = bytes - 1;
        EXPECT_EQ(kvx_attend(&there.args, context().stream), KVX_STATUS_INVALID_ARGUMENT);
      }
      there.args.workspace_bytes = bytes;
      ASSERT_EQ(kvx_attend(&there.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
      synchronize();
      device.mirror().fetch(there.out);
      EXPECT_LT(api_test::largest_difference(there.out, host.out), 1e-4);
      EXPECT_EQ(device.out_of_range(), 0u);
    }
  }
}

TEST_F(GpuAbiVerbs, TakeEveryTableOfOneCache) {
  Filled filled(KVX_FORMAT_INT8);
  DeviceLayer device(memory(), filled.layer);
  const std::vector<float> expected = attend_to(device, filled.sequence);
  std::vector<int32_t> ids = filled.sequence.blocks, page_sums = {0, 3};
  std::vector<int32_t> token_sums = {0, api_test::kTokens}, offsets = ids;
  for (const int32_t id : ids) offsets.push_back(id + 1);
  std::vector<int64_t> wide(ids.begin(), ids.end()), wide_length = {api_test::kTokens}, tokens;
  for (int t = 0; t < api_test::kTokens; ++t) tokens.push_back(wide[t / 8]);
  Mirror& mirror = device.mirror();

  api_test::OneSequence in_64_bits(ids, api_test::kTokens);
  in_64_bits.table.index_dtype = KVX_DTYPE_S64;
  in_64_bits.table.indices = mirror.add(wide);
  in_64_bits.seq_lens.dtype = KVX_DTYPE_S64;
  in_64_bits.seq_lens.lengths = mirror.add(wide_length);
  EXPECT_EQ(attend_on(device, in_64_bits), expected);

  api_test::OneSequence of_pages(ids, api_test::kTokens);
  of_pages.table = in_64_bits.table;
  of_pages.seq_lens = in_64_bits.seq_lens;
  of_pages.table.format = KVX_BLOCK_TABLE_RAGGED;
  of_pages.table.flags = KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
  of_pages.table.indptr_dtype = KVX_DTYPE_S32;
  of_pages.table.indptr_count = 2;
  of_pages.table.indptr = mirror.add(page_sums);
  EXPECT_EQ(attend_on(device, of_pages), expected);

  api_test::OneSequence of_tokens(ids, api_test::kTokens);
  of_tokens.table = of_pages.table;
  of_tokens.seq_lens = of_pages.seq_lens;
  of_tokens.table.flags = 0;
  of_tokens.table.indptr = mirror.add(token_sums);
  of_tokens.table.indices = mirror.add(tokens);
  of_tokens.table.indices_count = api_test::kTokens;
  EXPECT_EQ(attend_on(device, of_tokens), expected);

  api_test::OneSequence of_tensor_rt(ids, api_test::kTokens);
  of_tensor_rt.table = in_64_bits.table;
  of_tensor_rt.seq_lens = in_64_bits.seq_lens;
  of_tensor_rt.table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  of_tensor_rt.table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  of_tensor_rt.table.index_dtype = KVX_DTYPE_S32;
  of_tensor_rt.table.indices = mirror.add(offsets);
  of_tensor_rt.table.indices_count = 6;
  EXPECT_EQ(attend_on(device, of_tensor_rt), expected);
  EXPECT_EQ(device.out_of_range(), 0u);

  std::vector<float> k(filled.k.size()), v(filled.v.size());
  ASSERT_EQ(api_test::gather_rows(filled.layer.layer, filled.sequence, k, v), KVX_STATUS_OK);
  DeviceGather gather(device, filled, api_test::kTokens);
  gather.table = of_pages.table;
  gather.lengths = of_pages.seq_lens;
  ASSERT_EQ(kvx_gather(&gather.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
  synchronize();
  mirror.fetch(gather.k);
  mirror.fetch(gather.v);
  EXPECT_EQ(gather.k, k);
  EXPECT_EQ(gather.v, v);
}

TEST_F(GpuAbiVerbs, ATableThatChangesInsideABlockIsCounted) {
  Filled filled(KVX_FORMAT_INT8);
  DeviceLayer device(memory(), filled.layer);
  std::vector<int32_t> token_sums = {0, api_test::kTokens};
  std::vector<int64_t> tokens;
  for (int t = 0; t < api_test::kTokens; ++t) tokens.push_back(filled.sequence.blocks[t / 8]);
  tokens[2] = 0;
  api_test::OneSequence there(filled.sequence.blocks, api_test::kTokens);
  there.seq_lens.lengths = device.mirror().add(there.lengths);
  there.table.format = KVX_BLOCK_TABLE_RAGGED;
  there.table.index_dtype = KVX_DTYPE_S64;
  there.table.indptr_dtype = KVX_DTYPE_S32;
  there.table.indptr_count = 2;
  there.table.indptr = device.mirror().add(token_sums);
  there.table.indices = device.mirror().add(tokens);
  there.table.indices_count = api_test::kTokens;
  attend_on(device, there);
  EXPECT_GT(device.out_of_range(), 0u);
}

TEST_F(GpuAbiVerbs, AttendGivesZerosToPaddingAndCountsNothing) {
  for (const kvx_format_t format : kSomeFormats) {
    SCOPED_TRACE(format);
    const Geometry geometry = {.num_blocks = 3, .head_dim = 64};
    PagedLayer pages(geometry, api_test::in_page(format), api_test::in_page(format));
    DeviceLayer device(memory(), pages);
    const std::vector<float> out = attend_to(device, api_test::OneSequence({0, 1}, 0));
    for (const float number : out) ASSERT_EQ(number, 0.0f);
    EXPECT_EQ(device.out_of_range(), 0u);
  }
}

TEST_F(GpuAbiVerbs, CopyBlocksWritesTheHostsBytes) {
  for (const kvx_format_t to : {KVX_FORMAT_INT8, KVX_FORMAT_BF16}) {
    Filled filled(KVX_FORMAT_INT8);
    PagedLayer host(filled.geometry, api_test::in_page(to), api_test::in_page(to));
    PagedLayer pages(filled.geometry, api_test::in_page(to), api_test::in_page(to));
    std::vector<int64_t> from_blocks = {4, 1};
    std::vector<int64_t> to_blocks = {0, 5};
    std::vector<int32_t> num_tokens = {8, 3};
    auto args = sized<kvx_copy_args_t>();
    args.num_copies = 2;
    args.from = &filled.layer.layer;
    args.to = &host.layer;
    args.from_blocks = from_blocks.data();
    args.to_blocks = to_blocks.data();
    args.num_tokens = num_tokens.data();
    ASSERT_EQ(kvx_copy_blocks(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    DeviceLayer from(memory(), filled.layer);
    DeviceLayer device(memory(), pages);
    args.from = &from.layer;
    args.to = &device.layer;
    args.from_blocks = device.mirror().add(from_blocks);
    args.to_blocks = device.mirror().add(to_blocks);
    args.num_tokens = device.mirror().add(num_tokens);
    ASSERT_EQ(kvx_copy_blocks(&args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    device.fetch();
    EXPECT_TRUE(same_bytes(host.memory, pages.memory));
  }
}

// Opaque pages of a caller in interleaved order: rows and attention of the host's nibbles, and
// copies between both orders.
TEST_F(GpuAbiVerbs, TakeCallersPagesInterleaved) {
  const Geometry geometry{6, 64, 2, 64};
  const int num_tokens = 3 * 64;
  const api_test::OneSequence sequence({4, 1, 2}, num_tokens);
  for (const kvx_format_t format : {KVX_FORMAT_NVFP4, KVX_FORMAT_MXFP4, KVX_FORMAT_MXFP4_G16}) {
    SCOPED_TRACE(format);
    std::vector<float> k = api_test::test_rows(num_tokens, 2, 64, 0.0f);
    std::vector<float> v = api_test::test_rows(num_tokens, 2, 64, 0.5f);
    slots = api_test::slots_of(sequence, 64);
    PagedLayer host(geometry, api_test::in_page(format), api_test::in_page(format));
    ASSERT_EQ(api_test::append_rows(host.layer, k, v, slots), KVX_STATUS_OK) << kvx_last_error();

    PagedLayer pages(geometry, api_test::in_page(format), api_test::in_page(format));
    DeviceLayer nibbles(memory(), pages);
    DeviceLayer interleaved(memory(), pages);
    uint32_t prefers = 2;
    ASSERT_EQ(kvx_attend_prefers_interleaved_order(&interleaved.layer, &prefers), KVX_STATUS_OK)
        << kvx_last_error();
    EXPECT_EQ(prefers, device::cuda_code_version(context().device) == 90 ? 1u : 0u);
    interleaved.set_flags(KVX_SIDE_INTERLEAVED_ORDER);

    // Appended there, and copied there from a layer in nibbles: the same bytes, which are not the
    // nibbles'; copied back, the host's.
    ASSERT_EQ(append(interleaved, k, v), KVX_STATUS_OK) << kvx_last_error();
    std::vector<int64_t> blocks = {4, 1, 2};
    auto copy = sized<kvx_copy_args_t>();
    copy.num_copies = 3;
    copy.from = &interleaved.layer;
    copy.to = &nibbles.layer;
    copy.from_blocks = copy.to_blocks = interleaved.mirror().add(blocks);
    ASSERT_EQ(kvx_copy_blocks(&copy, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    nibbles.fetch();
    EXPECT_TRUE(same_bytes(host.memory, pages.memory));
    interleaved.fetch();
    const std::vector<uint8_t> appended = pages.memory;
    EXPECT_FALSE(appended == host.memory);
    DeviceLayer copied(memory(), pages);  // of the same bytes, to be written over
    copied.set_flags(KVX_SIDE_INTERLEAVED_ORDER);
    copy.from = &nibbles.layer;
    copy.to = &copied.layer;
    ASSERT_EQ(kvx_copy_blocks(&copy, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    copied.fetch();
    EXPECT_TRUE(same_bytes(appended, pages.memory));

    api_test::Attention on_host(host.layer, sequence, 1, 64);
    ASSERT_EQ(kvx_attend(&on_host.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_LT(api_test::largest_difference(attend_to(interleaved, sequence), on_host.out), 1e-4);
  }
}

// A layer on the device, one in the host's pinned memory: the GPU reads both.
TEST_F(GpuAbiVerbs, TranscodeAndCopyBlocksReachPinnedHostMemory) {
  const auto pinned = cache::pinned_memory(0);
  ASSERT_TRUE(pinned.ok());
  for (const uint32_t kind : {KVX_MEMORY_DEVICE, KVX_MEMORY_UNIFIED}) {
    Filled filled(KVX_FORMAT_INT8);
    PagedLayer host(filled.geometry, api_test::in_page(KVX_FORMAT_NVFP4),
                    api_test::in_page(KVX_FORMAT_BF16));
    PagedLayer pages(filled.geometry, api_test::in_page(KVX_FORMAT_NVFP4),
                     api_test::in_page(KVX_FORMAT_BF16));
    std::vector<int64_t> from_slots = api_test::slots_of(filled.sequence, 8);
    std::vector<int64_t> to_slots = from_slots;
    std::reverse(to_slots.begin(), to_slots.end());
    auto transcode = sized<kvx_transcode_args_t>();
    transcode.from = &filled.layer.layer;
    transcode.to = &host.layer;
    transcode.slot_dtype = KVX_DTYPE_S64;
    transcode.num_tokens = std::ssize(from_slots);
    transcode.from_slots = from_slots.data();
    transcode.to_slots = to_slots.data();
    ASSERT_EQ(kvx_transcode(&transcode, nullptr), KVX_STATUS_OK) << kvx_last_error();
    std::vector<int64_t> from_blocks = {4}, to_blocks = {0};
    auto copy = sized<kvx_copy_args_t>();
    copy.num_copies = 1;
    copy.from = &filled.layer.layer;
    copy.to = &host.layer;
    copy.from_blocks = from_blocks.data();
    copy.to_blocks = to_blocks.data();
    ASSERT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_OK) << kvx_last_error();

    DeviceLayer from(*pinned.value(), filled.layer);
    from.layer.memory = kind;
    DeviceLayer device(memory(), pages);
    transcode.from = copy.from = &from.layer;
    transcode.to = copy.to = &device.layer;
    transcode.from_slots = from.mirror().add(from_slots);
    transcode.to_slots = device.mirror().add(to_slots);
    copy.from_blocks = from.mirror().add(from_blocks);
    copy.to_blocks = device.mirror().add(to_blocks);
    ASSERT_EQ(kvx_transcode(&transcode, context().stream), KVX_STATUS_OK) << kvx_last_error();
    ASSERT_EQ(kvx_copy_blocks(&copy, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    device.fetch();
    EXPECT_TRUE(same_bytes(host.memory, pages.memory));
    EXPECT_EQ(device.out_of_range(), 0u);
  }
}

TEST_F(GpuAbiVerbs, RefuseWhatTheDeviceCannotDoAndSayWhy) {
  Filled filled(KVX_FORMAT_INT8);
  DeviceLayer device(memory(), filled.layer);
  const auto says = [](const char* words) {
    return std::string(kvx_last_error()).find(words) != std::string::npos;
  };
  const kvx_rows_t host_rows = api::rows(filled.k.data(), KVX_DTYPE_F32);
  auto append_args = sized<kvx_append_args_t>();
  append_args.layer = &device.layer;
  append_args.k = append_args.v = &host_rows;
  append_args.num_tokens = 1;
  slots = {0};
  append_args.slots = device.mirror().add(slots);
  append_args.slot_dtype = KVX_DTYPE_S32;
  EXPECT_EQ(kvx_append(&append_args, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_TRUE(says("slot_dtype")) << kvx_last_error();
  append_args.slot_dtype = KVX_DTYPE_S64;
  EXPECT_EQ(kvx_append(&append_args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_TRUE(says("k.data")) << kvx_last_error();
  auto transcode = sized<kvx_transcode_args_t>();
  transcode.from = &filled.layer.layer;
  transcode.to = &device.layer;
  transcode.slot_dtype = KVX_DTYPE_S64;
  EXPECT_EQ(kvx_transcode(&transcode, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_TRUE(says("one on the host and one on a GPU")) << kvx_last_error();
  DeviceLayer from(memory(), filled.layer);
  transcode.from = &from.layer;
  transcode.from_slots = transcode.to_slots = slots.data();
  transcode.num_tokens = 1;
  EXPECT_EQ(kvx_transcode(&transcode, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_TRUE(says("args.from_slots")) << kvx_last_error();
  kvx_layer_t pageable = filled.layer.layer;
  pageable.memory = KVX_MEMORY_DEVICE;
  transcode.from = &pageable;
  EXPECT_EQ(kvx_transcode(&transcode, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_TRUE(says("from is")) << kvx_last_error();
  kvx_layer_t as_host = device.layer;
  as_host.memory = KVX_MEMORY_HOST;
  append_args.layer = &as_host;
  EXPECT_EQ(kvx_append(&append_args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_TRUE(says("counters")) << kvx_last_error();
}

}  // namespace
}  // namespace kvx::tests
