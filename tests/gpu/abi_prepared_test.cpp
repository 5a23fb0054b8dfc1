// Prepared layers on a GPU: what the calls without a handle do, with less work of the host.
#include <gmock/gmock.h>

#include <chrono>

#include "tests/gpu/device_layer.hpp"
#include "tests/support/compare_bytes.hpp"

namespace kvx::tests::abi_prepared_test {
namespace {

using api_test::Filled;
using api_test::Geometry;
using api_test::OneSequence;
using api_test::PagedLayer;
using api_test::sized;
using testing::HasSubstr;

constexpr kvx_format_t kFormats[] = {KVX_FORMAT_BF16, KVX_FORMAT_INT8, KVX_FORMAT_NVFP4};
constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;

class Handle {
 public:
  explicit Handle(const DeviceLayer& layer) {
    EXPECT_EQ(kvx_prepare_layer(&layer.layer, nullptr, &handle_), KVX_STATUS_OK)
        << kvx_last_error();
  }
  Handle(const Handle&) = delete;
  ~Handle() { kvx_prepared_layer_free(handle_); }
  operator kvx_prepared_layer_t() const { return handle_; }

 private:
  kvx_prepared_layer_t handle_ = nullptr;
};

// Two decodes and a prompt over the blocks of one sequence, with everything on the device.
struct Batch {
  static constexpr int kSequences = 3, kQueries = 8, kRows = 11, kHeads = api_test::kQHeads;

  explicit Batch(Mirror& mirror, uint32_t head_dim = 32)
      : q(api_test::test_rows(kRows, kHeads, head_dim, 4.2f)), out(q.size(), 9.0f) {
    table.seq_count = kSequences;
    table.indices_count = 3 * kSequences;
    table.indices = mirror.add(ids);
    seq_lens.lengths = mirror.add(lengths);
    q_rows = api::rows(mirror.add(q), KVX_DTYPE_F32);
    out_rows = api::rows(mirror.add(out), KVX_DTYPE_F32);
    args.block_table = &table;
    args.seq_lens = &seq_lens;
    args.q_starts = mirror.add(starts);
    args.num_q_heads = kHeads;
    args.q = &q_rows;
    args.out = &out_rows;
    args.num_queries = kRows;  // the last three are padding
    args.max_q_len = 6;
    args.num_decodes = 2;
    args.block_table_stride = 5;
  }
  Batch(const Batch&) = delete;

  // What out holds after a call that is done; it is 9 before.
  std::vector<float> take_out(Mirror& mirror) {
    mirror.fetch(out);
    std::vector<float> taken = out;
    std::fill(out.begin(), out.end(), 9.0f);
    const int64_t bytes = std::ssize(out) * 4;
    EXPECT_TRUE(device::cuda_copy(out_rows.data, out.data(), bytes).ok());
    return taken;
  }

  std::vector<int32_t> ids = {4, 1, 5, -9, -9, 1, 5, 4, -9, -9, 4, 1, 5, -9, -9};
  std::vector<int32_t> lengths = {api_test::kTokens, 9, 17};
  std::vector<int32_t> starts = {0, 1, 2, kQueries};
  std::vector<float> q, out;
  kvx_block_table_t table = api::packed_table(ids, 3);
  kvx_seq_lens_t seq_lens = api::seq_lens(lengths);
  kvx_rows_t q_rows, out_rows;
  kvx_attend_args_t args = sized<kvx_attend_args_t>();
};

class GpuPrepared : public GpuTest {
 protected:
  // Room for every call here; the engine's way.
  void give_workspace(const DeviceLayer& layer, kvx_attend_args_t& args) {
    auto bounds = sized<kvx_attend_bounds_t>();
    bounds.max_sequences = 4;
    bounds.max_queries = 64;
    bounds.max_tokens = 64;
    bounds.max_q_len = 16;
    uint64_t bytes = 0, needed = 0;
    kvx_attend_args_t with_layer = args;
    with_layer.layer = &layer.layer;
    ASSERT_EQ(kvx_attend_workspace_up_to(&with_layer, &bounds, &bytes), KVX_STATUS_OK)
        << kvx_last_error();
    ASSERT_EQ(kvx_attend_workspace(&with_layer, &needed), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_LE(needed, bytes);
    workspace_ = memory().allocate(static_cast<int64_t>(bytes) + 1, "workspace").value();
    args.workspace = workspace_.data();
    args.workspace_bytes = bytes;
  }

 private:
  cache::Region workspace_;
};

TEST_F(GpuPrepared, AppendWritesTheHostsBytes) {
  for (const kvx_format_t format : kFormats) {
    SCOPED_TRACE(format);
    Filled filled(format);
    PagedLayer pages(filled.geometry, api_test::in_page(format), api_test::in_page(format));
    DeviceLayer device(memory(), pages);
    const Handle prepared(device);
    Mirror& mirror = device.mirror();
    std::vector<int64_t> slots = api_test::slots_of(filled.sequence, filled.geometry.block_size);
    const kvx_rows_t k = api::rows(mirror.add(filled.k), KVX_DTYPE_F32);
    const kvx_rows_t v = api::rows(mirror.add(filled.v), KVX_DTYPE_F32);
    auto args = sized<kvx_append_args_t>();
    args.k = &k;
    args.v = &v;
    args.slot_dtype = KVX_DTYPE_S64;
    args.slots = mirror.add(slots);
    args.num_tokens = std::ssize(slots);
    ASSERT_EQ(kvx_prepared_append(prepared, &args, context().stream), KVX_STATUS_OK)
        << kvx_last_error();
    synchronize();
    device.fetch();
    EXPECT_TRUE(same_bytes(filled.layer.memory, pages.memory));
    args.layer = &device.layer;
    EXPECT_EQ(kvx_prepared_append(prepared, &args, context().stream), kInvalid);
    EXPECT_THAT(kvx_last_error(), HasSubstr("args.layer is set"));
  }
}

TEST_F(GpuPrepared, AttendIsThatOfTheCallWithALayer) {
  for (const kvx_format_t format : kFormats) {
    SCOPED_TRACE(format);
    Filled filled(format), other(format);
    DeviceLayer first(memory(), filled.layer), second(memory(), other.layer);
    Batch batch(first.mirror());
    give_workspace(first, batch.args);
    for (DeviceLayer* layer : {&first, &second}) {  // the second finds the first's plan
      batch.args.layer = &layer->layer;
      ASSERT_EQ(kvx_attend(&batch.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
      synchronize();
      const std::vector<float> expected = batch.take_out(first.mirror());
      batch.args.layer = nullptr;
      const Handle prepared(*layer);
      ASSERT_EQ(kvx_prepared_attend(prepared, &batch.args, context().stream), KVX_STATUS_OK)
          << kvx_last_error();
      synchronize();
      EXPECT_EQ(batch.take_out(first.mirror()), expected);
      EXPECT_EQ(layer->out_of_range(), 0u);
      const size_t padding = static_cast<size_t>(Batch::kQueries) * Batch::kHeads * 32;
      EXPECT_TRUE(std::all_of(expected.begin() + padding, expected.end(),
                              [](float x) { return x == 9.0f; }));
      EXPECT_TRUE(std::none_of(expected.begin(), expected.begin() + padding,
                               [](float x) { return x == 9.0f; }));
    }
    // Decodes and prompts apart, or in one launch: the same attention.
    batch.args.layer = &first.layer;
    ASSERT_EQ(kvx_attend(&batch.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    const std::vector<float> apart = batch.take_out(first.mirror());
    batch.args.num_decodes = 0;
    ASSERT_EQ(kvx_attend(&batch.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    EXPECT_LT(api_test::largest_difference(batch.take_out(first.mirror()), apart), 1e-3);
  }
}

TEST_F(GpuPrepared, AttendRefusesWhatTheCallWithALayerRefuses) {
  Filled filled(KVX_FORMAT_INT8);
  DeviceLayer device(memory(), filled.layer);
  Batch batch(device.mirror());
  give_workspace(device, batch.args);
  const Handle prepared(device);
  const auto refused = [&](const char* words, auto change) {
    kvx_attend_args_t args = batch.args;
    change(args);
    EXPECT_NE(kvx_prepared_attend(prepared, &args, context().stream), KVX_STATUS_OK) << words;
    EXPECT_THAT(kvx_last_error(), HasSubstr(words));
  };
  refused("args.layer or full_precision is set", [&](auto& args) { args.layer = &device.layer; });
  refused("num_sink_blocks", [](auto& args) { args.num_sink_blocks = args.q_starts; });
  refused("args.num_decodes is 4", [](auto& args) { args.num_decodes = 4; });
  refused("args.block_table_stride is 2", [](auto& args) { args.block_table_stride = 2; });
  refused("num_q_heads is 3", [](auto& args) { args.num_q_heads = 3; });
  refused("args.q_starts is null", [](auto& args) { args.q_starts = nullptr; });
  refused("max_q_len is 0", [](auto& args) { args.max_q_len = 0; });
  refused("on a multiple of 256",
          [](auto& args) { args.workspace = static_cast<uint8_t*>(args.workspace) + 16; });
  EXPECT_EQ(batch.take_out(device.mirror()), std::vector<float>(batch.out.size(), 9.0f));
}

TEST_F(GpuPrepared, AHandleThatWasFreedIsRefused) {
  Filled filled(KVX_FORMAT_INT8);
  DeviceLayer device(memory(), filled.layer);
  Batch batch(device.mirror());
  kvx_prepared_layer_t handle = nullptr;
  ASSERT_EQ(kvx_prepare_layer(&device.layer, nullptr, &handle), KVX_STATUS_OK);
  kvx_prepared_layer_free(handle);
  kvx_prepared_layer_free(handle);
  EXPECT_EQ(kvx_prepared_attend(handle, &batch.args, context().stream), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("was freed"));
}

TEST_F(GpuPrepared, AHostsAddressIsRefusedWhenALayerIsPrepared) {
  Filled filled(KVX_FORMAT_INT8);
  DeviceLayer device(memory(), filled.layer);
  kvx_layer_t wrong = filled.layer.layer;
  wrong.memory = KVX_MEMORY_DEVICE;
  kvx_prepared_layer_t handle = nullptr;
  EXPECT_EQ(kvx_prepare_layer(&wrong, nullptr, &handle), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("memory"));
  EXPECT_EQ(handle, nullptr);
}

// What a call costs the host is recorded, and decides nothing.
TEST_F(GpuPrepared, HostTimeOfACallIsRecorded) {
  PagedLayer pages(Geometry{6, 64, 2, 64}, api_test::in_page(KVX_FORMAT_INT8),
                   api_test::in_page(KVX_FORMAT_INT8));
  DeviceLayer device(memory(), pages);
  Batch batch(device.mirror(), 64);
  give_workspace(device, batch.args);
  const Handle prepared(device);
  kvx_attend_args_t with_layer = batch.args;
  with_layer.layer = &device.layer;
  constexpr int kCalls = 200;
  const auto time = [&](const char* name, const auto& call) {
    for (int i = 0; i < 20; ++i) EXPECT_EQ(call(), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) EXPECT_EQ(call(), KVX_STATUS_OK);
    const std::chrono::duration<double, std::micro> taken =
        std::chrono::steady_clock::now() - begin;
    synchronize();
    const std::string text = fmt::format("{:.2f}", taken.count() / kCalls);
    RecordProperty(name, text);
    fmt::print("{}: {} us of the host a call\n", name, text);
  };
  time("kvx_attend", [&] { return kvx_attend(&with_layer, context().stream); });
  time("kvx_prepared_attend",
       [&] { return kvx_prepared_attend(prepared, &batch.args, context().stream); });
  batch.args.num_decodes = 0;  // one launch instead of two
  time("kvx_prepared_attend_of_one_part",
       [&] { return kvx_prepared_attend(prepared, &batch.args, context().stream); });
}

}  // namespace
}  // namespace kvx::tests::abi_prepared_test
