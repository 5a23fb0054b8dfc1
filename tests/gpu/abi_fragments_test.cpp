// Rows in fragments on the device: the host's bytes and rows, and the attention over them.
#include <limits>
#include <memory>

#include "tests/api/caller_layer.hpp"
#include "tests/gpu/device_layer.hpp"
#include "tests/support/compare_bytes.hpp"

namespace kvx::tests::abi_fragments_test {
namespace {

using api_test::Geometry;
using api_test::PagedLayer;
using api_test::sized;

constexpr int kTokens = 21;
constexpr Geometry kGeometry{6, 8, 2, 64};

// How the rows of a page lie: [block, head, fragments, token, bytes].
struct FragmentCase {
  kvx_format_t format;
  uint32_t bytes;  // of a fragment; 0: contiguous rows
};

const FragmentCase kCases[] = {
    {KVX_FORMAT_F16, 16},   {KVX_FORMAT_F16, 2},          {KVX_FORMAT_BF16, 1},
    {KVX_FORMAT_F32, 4},    {KVX_FORMAT_FP8_E4M3, 1},     {KVX_FORMAT_INT8, 32},
    {KVX_FORMAT_NVFP4, 4},  {KVX_FORMAT_INT4_AFFINE, 8},  {KVX_FORMAT_INT4_ROW, 2},
    {KVX_FORMAT_MXFP4, 16}, {KVX_FORMAT_INT8_AFFINE, 64},
};

void lay_in_fragments(kvx_side_t& side, uint32_t bytes) {
  if (bytes == 0) return;
  ASSERT_EQ(side.code_token_stride % bytes, 0) << "rows of a head follow each other";
  side.code_fragment_bytes = bytes;
  side.code_fragment_stride = int64_t{bytes} * kGeometry.block_size;
  side.code_token_stride = bytes;
}

// Pages whose rows lie in fragments.
struct FragmentedPages : PagedLayer {
  explicit FragmentedPages(const FragmentCase& given)
      : PagedLayer(kGeometry, api_test::in_page(given.format), api_test::in_page(given.format)) {
    EXPECT_EQ(status, KVX_STATUS_OK) << kvx_last_error();
    lay_in_fragments(k, given.bytes);
    lay_in_fragments(v, given.bytes);
  }
};

// llama.cpp's blocks of 32 numbers, [scale: f16][codes], of all tokens of a cache.
struct LlamaCppCache {
  explicit LlamaCppCache(bool is_q4_0)
      : block_bytes(2 + (is_q4_0 ? 16 : 32)), row_bytes(2 * 2 * block_bytes) {
    spec.format = is_q4_0 ? KVX_FORMAT_INT4 : KVX_FORMAT_INT8;
    spec.group_size = 32;
    spec.scale_type = KVX_SCALE_TYPE_F16;
    memory.resize(static_cast<size_t>(2 * row_bytes * 48));
    for (kvx_side_t* side : {&k, &v}) {
      uint8_t* const base = memory.data() + (side == &k ? 0 : 48 * row_bytes);
      side->head_dim = 64;
      side->spec = &spec;
      side->codes = base + 2;
      side->scales = base;
      side->code_block_stride = side->scale_block_stride = 8 * row_bytes;
      side->code_token_stride = side->scale_token_stride = row_bytes;
      side->code_head_stride = side->scale_head_stride = 2 * block_bytes;
      side->scale_group_stride = side->code_fragment_stride = block_bytes;
      side->code_fragment_bytes = static_cast<uint32_t>(block_bytes - 2);
      side->flags = is_q4_0 ? KVX_SIDE_Q4_0_BLOCKS : 0;
    }
    run.num_heads = 2;
    run.k = &k;
    run.v = &v;
    layer.block_size = 8;
    layer.num_blocks = 6;
    layer.num_kv_heads = 2;
    layer.num_runs = 1;
    layer.runs = &runs;
  }
  LlamaCppCache(const LlamaCppCache&) = delete;

  int64_t block_bytes;
  int64_t row_bytes;  // of a token: two heads of two blocks
  kvx_format_spec_t spec = sized<kvx_format_spec_t>();
  std::vector<uint8_t> memory;
  kvx_side_t k = sized<kvx_side_t>();
  kvx_side_t v = sized<kvx_side_t>();
  kvx_head_run_t run = sized<kvx_head_run_t>();
  const kvx_head_run_t* runs = &run;
  kvx_layer_t layer = sized<kvx_layer_t>();
};

class GpuAbiFragments : public GpuTest {
 protected:
  // Calls test(a new layer of zeros) for every kind of layer, with `make` for another like it.
  template <class Test>
  void for_each_layer(const Test& test) {
    for (const FragmentCase& given : kCases) {
      SCOPED_TRACE(fmt::format("format {}, fragments of {} bytes", static_cast<int>(given.format),
                               given.bytes));
      test([&given] { return std::make_unique<FragmentedPages>(given); });
      if (HasFatalFailure()) return;
    }
    for (const bool is_q4_0 : {false, true}) {
      SCOPED_TRACE(is_q4_0 ? "q4_0" : "q8_0");
      test([is_q4_0] { return std::make_unique<LlamaCppCache>(is_q4_0); });
      if (HasFatalFailure()) return;
    }
  }

  // Rows of which one is zeros, and one has a large number.
  static std::vector<float> rows(float seed) {
    std::vector<float> x = api_test::test_rows(kTokens, 2, 64, seed);
    std::fill(x.begin() + 64, x.begin() + 128, 0.0f);
    x[300] = 6e4f;
    return x;
  }
  void fill(const kvx_layer_t& layer) {
    ASSERT_EQ(api_test::append_rows(layer, k, v, slots), KVX_STATUS_OK) << kvx_last_error();
  }

  const api_test::OneSequence sequence{{4, 1, 5}, kTokens};
  std::vector<int64_t> slots = api_test::slots_of(sequence, kGeometry.block_size);
  std::vector<float> k = rows(0.3f);
  std::vector<float> v = rows(1.9f);
};

TEST_F(GpuAbiFragments, AppendWritesTheHostsBytes) {
  k[7] = std::numeric_limits<float>::quiet_NaN();
  v[200] = -std::numeric_limits<float>::infinity();
  for_each_layer([&](const auto& make) {
    const auto host = make();
    fill(host->layer);
    const auto pages = make();
    DeviceLayer device(memory(), *pages);
    const kvx_rows_t k_rows = api::rows(device.mirror().add(k), KVX_DTYPE_F32);
    const kvx_rows_t v_rows = api::rows(device.mirror().add(v), KVX_DTYPE_F32);
    kvx_append_args_t args = api_test::append_args(device.layer, k_rows, slots);
    args.v = &v_rows;
    args.slots = device.mirror().add(slots);
    ASSERT_EQ(kvx_append(&args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    device.fetch();
    EXPECT_TRUE(same_bytes(host->memory, pages->memory));
    EXPECT_EQ(device.out_of_range(), 0u);
  });
}

TEST_F(GpuAbiFragments, GatherReadsTheHostsRows) {
  for_each_layer([&](const auto& make) {
    const auto pages = make();
    fill(pages->layer);
    std::vector<float> host_k(k.size()), host_v(v.size()), device_k(k.size()), device_v(v.size());
    ASSERT_EQ(api_test::gather_rows(pages->layer, sequence, host_k, host_v), KVX_STATUS_OK)
        << kvx_last_error();
    DeviceLayer device(memory(), *pages);
    api_test::OneSequence there({4, 1, 5}, kTokens);
    there.table.indices = device.mirror().add(there.blocks);
    there.seq_lens.lengths = device.mirror().add(there.lengths);
    const kvx_rows_t k_rows = api::rows(device.mirror().add(device_k), KVX_DTYPE_F32);
    const kvx_rows_t v_rows = api::rows(device.mirror().add(device_v), KVX_DTYPE_F32);
    kvx_gather_args_t args = api_test::gather_args(device.layer, there, k_rows);
    args.v = &v_rows;
    ASSERT_EQ(kvx_gather(&args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    device.mirror().fetch(device_k);
    device.mirror().fetch(device_v);
    EXPECT_TRUE(host_k == device_k) << "K differs";
    EXPECT_TRUE(host_v == device_v) << "V differs";
  });
}

TEST_F(GpuAbiFragments, AttendGivesTheHostsAttention) {
  k[300] = v[300] = 0.5f;
  for_each_layer([&](const auto& make) {
    const auto pages = make();
    fill(pages->layer);
    api_test::Attention host(pages->layer, sequence, 1, 64);
    ASSERT_EQ(kvx_attend(&host.args, nullptr), KVX_STATUS_OK) << kvx_last_error();

    DeviceLayer device(memory(), *pages);
    api_test::OneSequence there({4, 1, 5}, kTokens);
    there.table.indices = device.mirror().add(there.blocks);
    there.seq_lens.lengths = device.mirror().add(there.lengths);
    api_test::Attention found(device.layer, there, 1, 64);
    std::fill(found.out.begin(), found.out.end(), 9.0f);  // what is not written is seen
    found.q_rows.data = device.mirror().add(found.q);
    found.out_rows.data = device.mirror().add(found.out);
    found.args.q_starts = device.mirror().add(found.starts);
    found.args.num_queries = found.args.max_q_len = 1;
    uint64_t bytes = 0;
    ASSERT_EQ(kvx_attend_workspace(&found.args, &bytes), KVX_STATUS_OK) << kvx_last_error();
    const auto workspace = memory().allocate(static_cast<int64_t>(bytes) + 1, "workspace");
    found.args.workspace = workspace.value().data();
    found.args.workspace_bytes = bytes;
    ASSERT_EQ(kvx_attend(&found.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    device.mirror().fetch(found.out);
    EXPECT_LT(api_test::largest_difference(found.out, host.out), 1e-4);
  });
}

// To layers of the same kind, to contiguous rows of the same format and of bf16, and back.
TEST_F(GpuAbiFragments, CopyBlocksAndTranscodeWriteTheHostsBytes) {
  std::vector<int64_t> from_blocks = {4, 1}, to_blocks = {0, 5};
  std::vector<int32_t> num_tokens = {8, 3};
  std::vector<int64_t> to_slots(slots.rbegin(), slots.rend());
  const auto compare = [&](auto& source, auto& host, auto& pages, bool is_copy) {
    auto copy = sized<kvx_copy_args_t>();
    copy.num_copies = 2;
    copy.from = &source.layer;
    copy.to = &host.layer;
    copy.from_blocks = from_blocks.data();
    copy.to_blocks = to_blocks.data();
    copy.num_tokens = num_tokens.data();
    auto transcode = sized<kvx_transcode_args_t>();
    transcode.from = &source.layer;
    transcode.to = &host.layer;
    transcode.slot_dtype = KVX_DTYPE_S64;
    transcode.from_slots = slots.data();
    transcode.to_slots = to_slots.data();
    transcode.num_tokens = kTokens;
    const auto call = [&](void* stream) {
      return is_copy ? kvx_copy_blocks(&copy, stream) : kvx_transcode(&transcode, stream);
    };
    ASSERT_EQ(call(nullptr), KVX_STATUS_OK) << kvx_last_error();
    DeviceLayer from(memory(), source);
    DeviceLayer to(memory(), pages);
    copy.from = transcode.from = &from.layer;
    copy.to = transcode.to = &to.layer;
    Mirror& mirror = to.mirror();
    copy.from_blocks = mirror.add(from_blocks);
    copy.to_blocks = mirror.add(to_blocks);
    copy.num_tokens = mirror.add(num_tokens);
    transcode.from_slots = mirror.add(slots);
    transcode.to_slots = mirror.add(to_slots);
    ASSERT_EQ(call(context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    to.fetch();
    EXPECT_TRUE(same_bytes(host.memory, pages.memory)) << (is_copy ? "copy_blocks" : "transcode");
  };
  for (const bool is_copy : {true, false}) {
    for_each_layer([&](const auto& make) {
      const auto source = make();
      fill(source->layer);
      const auto host = make(), pages = make();
      compare(*source, *host, *pages, is_copy);
      for (const FragmentCase& other :
           {FragmentCase{KVX_FORMAT_INT8, 0}, {KVX_FORMAT_BF16, 0}, {KVX_FORMAT_NVFP4, 8}}) {
        SCOPED_TRACE(static_cast<int>(other.format));
        FragmentedPages other_host(other), other_pages(other);
        compare(*source, other_host, other_pages, is_copy);
        FragmentedPages other_source(other);
        fill(other_source.layer);
        const auto back_host = make(), back = make();
        compare(other_source, *back_host, *back, is_copy);
      }
    });
  }
}

}  // namespace
}  // namespace kvx::tests::abi_fragments_test
