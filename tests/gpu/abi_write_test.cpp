// kvx_write_kv with device memory: the host's bytes, whatever the layout, the types and the scales.
#include "core/float16.hpp"
#include "tests/api/caller_layer.hpp"
#include "tests/gpu/device_v1.hpp"

namespace kvx::tests::abi_write_test {
namespace {

using api_test::Cache;
using api_test::Io;
using api_test::Layout;
using api_test::Shape;

struct Case {
  Shape shape = {};
  Layout layout = {};
  kvx_dtype_t io = KVX_DTYPE_F16;
  kvx_dtype_t k = KVX_DTYPE_F16;
  kvx_dtype_t v = KVX_DTYPE_F16;
  int64_t num_sequences = 0;
  int64_t gap = 0;
  kvx_scale_granularity_t granularity = KVX_SCALE_NONE;
  kvx_dtype_t scale_dtype = KVX_DTYPE_F32;
  std::vector<int64_t> slots = {3, 4, 5, 6, 7, 8, -1, 19, 0, 2, 11, 10};
};

// Scales [blocks, heads] of which a granularity uses some, in their type.
std::vector<uint8_t> some_scales(const Case& given) {
  const bool is_f32 = given.scale_dtype == KVX_DTYPE_F32;
  std::vector<uint8_t> scales;
  for (uint32_t i = 0; i < given.shape.num_blocks * given.shape.num_heads; ++i) {
    const float scale = 0.03f + 0.011f * static_cast<float>(i);
    const uint32_t bits = is_f32                               ? std::bit_cast<uint32_t>(scale)
                          : given.scale_dtype == KVX_DTYPE_F16 ? f32_to_f16(scale)
                                                               : f32_to_bf16(scale);
    const auto* const bytes = reinterpret_cast<const uint8_t*>(&bits);
    scales.insert(scales.end(), bytes, bytes + (is_f32 ? 4 : 2));
  }
  return scales;
}

kvx_scale_desc_t scale_desc(const Case& given, const void* scales) {
  kvx_scale_desc_t desc{};
  if (given.granularity == KVX_SCALE_NONE) return desc;
  desc.size = sizeof desc;
  desc.dtype = given.scale_dtype;
  desc.granularity = given.granularity;
  desc.data = scales;
  const auto add_axis = [&desc](int64_t extent, int64_t stride) {
    desc.shape[desc.ndim] = extent;
    desc.stride[desc.ndim++] = stride;
  };
  const bool has_blocks =
      given.granularity == KVX_SCALE_PER_BLOCK || given.granularity == KVX_SCALE_PER_BLOCK_HEAD;
  const bool has_heads =
      given.granularity == KVX_SCALE_PER_HEAD || given.granularity == KVX_SCALE_PER_BLOCK_HEAD;
  if (has_blocks) add_axis(given.shape.num_blocks, given.shape.num_heads);
  if (has_heads) add_axis(given.shape.num_heads, 1);
  if (desc.ndim == 0) add_axis(1, 1);
  return desc;
}

class GpuAbiWrite : public GpuTest {
 protected:
  // The same write on both; slots beyond the cache are skipped on the device only.
  void compare(const Case& given) {
    Cache host(given.shape, given.layout, given.k, given.v);
    Cache device(given.shape, given.layout, given.k, given.v);
    Io io(given.shape, std::ssize(given.slots), given.io, given.io, given.num_sequences, given.gap);
    std::vector<int64_t> known = given.slots;
    for (int64_t& slot : known) slot = slot < given.shape.num_slots() ? slot : -1;
    std::vector<uint8_t> scales = some_scales(given);

    kvx_write_desc_t write = api_test::write_desc(io, known);
    write.k_scale_desc = write.v_scale_desc = scale_desc(given, scales.data());
    ASSERT_EQ(kvx_write_kv(&host.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();

    DeviceV1 there(memory());
    there.add(device);
    there.add(io);
    std::vector<int64_t> slots = given.slots;
    kvx_write_desc_t call = api_test::write_desc(io, slots);
    call.io = there.carried(io.desc);
    call.slots.slots = there.add(slots);
    call.k_scale_desc = call.v_scale_desc = scale_desc(given, there.add(scales));
    const kvx_cache_desc_t cache = there.carried(device.desc);
    ASSERT_EQ(kvx_write_kv(&cache, &call, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    there.fetch();
    EXPECT_TRUE(host.k_memory == device.k_memory) << "K differs";
    EXPECT_TRUE(host.v_memory == device.v_memory) << "V differs";
  }
};

TEST_F(GpuAbiWrite, PutsTheHostsBytesWhereEachLayoutSays) {
  for (const Layout& layout : api_test::all_layouts()) {
    for (const kvx_dtype_t dtype :
         {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2}) {
      SCOPED_TRACE(layout.name + ", dtype " + std::to_string(dtype));
      compare({.layout = layout, .io = dtype, .k = dtype, .v = dtype});
    }
  }
}

TEST_F(GpuAbiWrite, TakesShapesThatAreNoMultipleOfAnything) {
  for (const uint32_t head_dim : {1u, 5u, 80u, 128u, 264u}) {
    for (const uint32_t heads : {1u, 3u, 8u}) {
      SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(head_dim));
      const Shape shape = {.num_heads = heads, .head_dim = head_dim};
      compare({.shape = shape});
      compare({.shape = shape, .layout = {.layout = KVX_LAYOUT_BLOCK_HND}});
      compare({.shape = shape, .io = KVX_DTYPE_F32, .k = KVX_DTYPE_BF16, .v = KVX_DTYPE_F8_E4M3});
      compare({.shape = shape,
               .layout = {.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 1, .v_pack = 1}});
    }
  }
}

TEST_F(GpuAbiWrite, TakesPaddedAndGappedIo) {
  for (const auto& [sequences, gap] : {std::pair{0, 16}, {3, 0}, {3, 32}, {12, 0}, {1, 0}}) {
    SCOPED_TRACE(std::to_string(sequences) + " sequences, gap " + std::to_string(gap));
    compare({.num_sequences = sequences, .gap = gap});
  }
}

TEST_F(GpuAbiWrite, EncodesWithScalesOfEveryGranularity) {
  for (const kvx_scale_granularity_t granularity :
       {KVX_SCALE_NONE, KVX_SCALE_PER_TENSOR, KVX_SCALE_PER_BLOCK, KVX_SCALE_PER_HEAD,
        KVX_SCALE_PER_BLOCK_HEAD}) {
    for (const kvx_dtype_t io : {KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16}) {
      SCOPED_TRACE(std::to_string(granularity) + ", io " + std::to_string(io));
      compare(
          {.io = io, .k = KVX_DTYPE_F8_E4M3, .v = KVX_DTYPE_F8_E5M2, .granularity = granularity});
    }
  }
}

// The scales of kvx_layer_t.k_scale and v_scale.
struct ScaleKind {
  kvx_scale_granularity_t granularity;
  kvx_dtype_t dtype = KVX_DTYPE_F32;
};
const ScaleKind kScaleKinds[] = {
    {KVX_SCALE_PER_TENSOR},
    {KVX_SCALE_PER_BLOCK},
    {KVX_SCALE_PER_HEAD},
    {KVX_SCALE_PER_BLOCK_HEAD},
    {KVX_SCALE_PER_TENSOR, KVX_DTYPE_F16},
    {KVX_SCALE_PER_BLOCK, KVX_DTYPE_BF16},
    {KVX_SCALE_PER_HEAD, KVX_DTYPE_BF16},
    {KVX_SCALE_PER_BLOCK_HEAD, KVX_DTYPE_F16},
};

TEST_F(GpuAbiWrite, AppendToAnF8CacheWritesTheBytesOfTheHostsV1Call) {
  for (const auto& [granularity, scale_dtype] : kScaleKinds) {
    SCOPED_TRACE(fmt::format("granularity {}, dtype {}", static_cast<int>(granularity),
                             static_cast<int>(scale_dtype)));
    const Case given = {.k = KVX_DTYPE_F8_E4M3,
                        .v = KVX_DTYPE_F8_E5M2,
                        .granularity = granularity,
                        .scale_dtype = scale_dtype};
    Cache host(given.shape, given.layout, given.k, given.v);
    Cache device(given.shape, given.layout, given.k, given.v);
    Io io(given.shape, std::ssize(given.slots), KVX_DTYPE_F32, KVX_DTYPE_F32);
    std::vector<uint8_t> scales = some_scales(given);
    kvx_write_desc_t write = api_test::write_desc(io, given.slots);
    write.k_scale_desc = write.v_scale_desc = scale_desc(given, scales.data());
    ASSERT_EQ(kvx_write_kv(&host.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();

    DeviceV1 there(memory());
    there.add(device);
    there.add(io);
    std::vector<int64_t> slots = given.slots;
    const kvx_cache_desc_t cache = there.carried(device.desc);
    const kvx_scale_desc_t scale = scale_desc(given, there.add(scales));
    auto layer = api::sized<kvx_layer_t>();
    layer.cache = &cache;
    layer.k_scale = layer.v_scale = &scale;
    const kvx_kv_io_desc_t rows = there.carried(io.desc);
    const kvx_rows_t k = api::rows(static_cast<float*>(rows.key.data), KVX_DTYPE_F32);
    const kvx_rows_t v = api::rows(static_cast<float*>(rows.value.data), KVX_DTYPE_F32);
    auto args = api::sized<kvx_append_args_t>();
    args.layer = &layer;
    args.k = &k;
    args.v = &v;
    args.slot_dtype = KVX_DTYPE_S64;
    args.slots = there.add(slots);
    args.num_tokens = std::ssize(slots);
    ASSERT_EQ(kvx_append(&args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    there.fetch();
    EXPECT_TRUE(host.k_memory == device.k_memory) << "K differs";
    EXPECT_TRUE(host.v_memory == device.v_memory) << "V differs";
  }
}

// Attention reads such a cache under its scales: near the host's, which reads the same bytes.
TEST_F(GpuAbiWrite, AttendReadsAnF8CacheUnderScalesOfEveryGranularity) {
  constexpr uint32_t kDim = 128;
  constexpr int kLength = 60;
  for (const auto& [granularity, scale_dtype] : kScaleKinds) {
    SCOPED_TRACE(fmt::format("granularity {}, dtype {}", static_cast<int>(granularity),
                             static_cast<int>(scale_dtype)));
    const Case given = {.shape = {.block_size = 16, .head_dim = kDim},
                        .k = KVX_DTYPE_F8_E4M3,
                        .v = KVX_DTYPE_F8_E4M3,
                        .granularity = granularity,
                        .scale_dtype = scale_dtype};
    Cache cache(given.shape, given.layout, given.k, given.v);
    std::vector<uint8_t> scales = some_scales(given);
    kvx_scale_desc_t scale = scale_desc(given, scales.data());
    auto layer = api::sized<kvx_layer_t>();
    layer.cache = &cache.desc;
    layer.k_scale = layer.v_scale = &scale;
    const api_test::OneSequence sequence({4, 1, 0, 3}, kLength);
    const std::vector<float> k = api_test::test_rows(kLength, 2, kDim, 0.3f);
    const std::vector<float> v = api_test::test_rows(kLength, 2, kDim, 1.9f);
    ASSERT_EQ(api_test::append_rows(layer, k, v, api_test::slots_of(sequence, 16)), KVX_STATUS_OK)
        << kvx_last_error();
    api_test::Attention host(layer, sequence, 1, kDim);
    ASSERT_EQ(kvx_attend(&host.args, nullptr), KVX_STATUS_OK) << kvx_last_error();

    DeviceV1 there(memory());
    there.add(cache);
    const kvx_cache_desc_t on_device = there.carried(cache.desc);
    scale.data = there.add(scales);
    layer.cache = &on_device;
    api_test::OneSequence table({4, 1, 0, 3}, kLength);
    table.table.indices = there.add(table.blocks);
    table.seq_lens.lengths = there.add(table.lengths);
    api_test::Attention found(layer, table, 1, kDim);
    found.args.q_starts = there.add(found.starts);
    found.q_rows.data = there.add(found.q);
    Mirror outputs(memory());
    found.out_rows.data = outputs.add(found.out);
    found.args.num_queries = 1;
    found.args.max_tokens = kLength;
    found.args.max_q_len = 1;
    uint64_t bytes = 0;
    ASSERT_EQ(kvx_attend_workspace(&found.args, &bytes), KVX_STATUS_OK) << kvx_last_error();
    const auto workspace = memory().allocate(static_cast<int64_t>(bytes) + 1, "workspace");
    ASSERT_TRUE(workspace.ok());
    found.args.workspace = workspace.value().data();
    found.args.workspace_bytes = bytes;
    ASSERT_EQ(kvx_attend(&found.args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    outputs.fetch(found.out);
    EXPECT_LT(api_test::largest_difference(found.out, host.out), 2e-3);
  }
}

TEST_F(GpuAbiWrite, SkipsSlotsBeyondTheCache) {
  compare({.slots = {20, INT64_MAX, 5, -3, INT64_MIN, 19}});
}

// A thread takes one token, two or four.
TEST_F(GpuAbiWrite, FillsCachesOfFewAndOfManyTokens) {
  for (const uint32_t num_blocks : {20, 60, 700}) {
    const Shape shape = {
        .num_blocks = num_blocks, .block_size = 16, .num_heads = 8, .head_dim = 128};
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < shape.num_slots(); ++i) slots.push_back(i * 4097 % shape.num_slots());
    compare({.shape = shape, .slots = slots});
    compare({.shape = shape,
             .layout = {.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 8, .v_pack = 1},
             .slots = slots});
  }
}

TEST_F(GpuAbiWrite, WritesNothingWithAScaleThatIsNone) {
  Cache cache({}, {}, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E4M3);
  Io io(cache.shape(), 2, KVX_DTYPE_F32, KVX_DTYPE_F32);
  std::vector<int64_t> slots = {0, 5};
  for (const float bad : {0.0f, -1.0f, INFINITY, NAN}) {
    const api_test::Memory before = cache.k_memory;
    DeviceV1 there(memory());
    there.add(cache);
    there.add(io);
    std::vector<float> scale = {bad};
    kvx_write_desc_t write = api_test::write_desc(io, slots);
    write.io = there.carried(io.desc);
    write.slots.slots = there.add(slots);
    write.k_scale = write.v_scale = there.add(scale);
    const kvx_cache_desc_t desc = there.carried(cache.desc);
    ASSERT_EQ(kvx_write_kv(&desc, &write, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    there.fetch();
    EXPECT_TRUE(before == cache.k_memory) << bad;
  }
}

TEST_F(GpuAbiWrite, CapturedInAGraphFollowsTheSlotsThatLieThereThen) {
  Cache host;
  Cache device;
  Io io(host.shape(), 4);
  std::vector<int64_t> slots = {1, 2, 3, 4};
  DeviceV1 there(memory());
  there.add(device);
  there.add(io);
  kvx_write_desc_t write = api_test::write_desc(io, slots);
  write.io = there.carried(io.desc);
  int64_t* slots_there = there.add(slots);
  write.slots.slots = slots_there;
  const kvx_cache_desc_t cache = there.carried(device.desc);
  const auto graph = device::CudaGraph::capture(context().stream, [&]() -> Status {
    if (kvx_launch_write_kv_f16(&cache, &write, context().stream) == KVX_STATUS_OK) return {};
    return Error{ErrorCode::kInternal, kvx_last_error()};
  });
  ASSERT_TRUE(graph.ok()) << graph.error().message;
  slots = {19, 0, 11, -1};
  ASSERT_TRUE(device::cuda_copy(slots_there, slots.data(), 4 * sizeof(int64_t)).ok());
  ASSERT_TRUE(graph.value().launch(context().stream).ok());
  synchronize();
  there.fetch();
  const kvx_write_desc_t expected = api_test::write_desc(io, slots);
  ASSERT_EQ(kvx_write_kv(&host.desc, &expected, nullptr), KVX_STATUS_OK);
  EXPECT_TRUE(host.k_memory == device.k_memory);
  EXPECT_TRUE(host.v_memory == device.v_memory);
}

TEST_F(GpuAbiWrite, NamesThePointerThatContradictsItsDescriptor) {
  Cache cache;
  Io io(cache.shape(), 1);
  std::vector<int64_t> slots = {0};
  DeviceV1 there(memory());
  there.add(cache);
  there.add(io);
  const kvx_cache_desc_t good_cache = there.carried(cache.desc);
  kvx_write_desc_t good = api_test::write_desc(io, slots);
  good.io = there.carried(io.desc);
  good.slots.slots = there.add(slots);
  const auto refuses = [&](const kvx_cache_desc_t& desc, const kvx_write_desc_t& write,
                           kvx_status_t status, const char* field) {
    EXPECT_EQ(kvx_write_kv(&desc, &write, nullptr), status);
    EXPECT_NE(std::string(kvx_last_error()).find(field), std::string::npos) << kvx_last_error();
  };
  kvx_cache_desc_t bad_cache = good_cache;
  bad_cache.v.data = cache.v_memory.data();
  refuses(bad_cache, good, KVX_STATUS_INVALID_ARGUMENT, "cache.v");
  bad_cache = good_cache;
  bad_cache.k.memory = KVX_MEMORY_UNIFIED;
  refuses(bad_cache, good, KVX_STATUS_INVALID_ARGUMENT, "cache.k");
  bad_cache = good_cache;
  bad_cache.k.memory = KVX_MEMORY_HOST;
  refuses(bad_cache, good, KVX_STATUS_UNSUPPORTED, "HOST 1");
  kvx_write_desc_t bad = good;
  bad.slots.slots = slots.data();
  refuses(good_cache, bad, KVX_STATUS_INVALID_ARGUMENT, "slots.slots");
  bad = good;
  bad.io.key.data = io.k_memory.data();
  refuses(good_cache, bad, KVX_STATUS_INVALID_ARGUMENT, "io.key");
}

}  // namespace
}  // namespace kvx::tests::abi_write_test
