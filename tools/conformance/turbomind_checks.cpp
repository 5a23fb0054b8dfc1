// TurboMind's pools: sizes of their blocks, where rows and parameters lie, and pointer tables.
#include <algorithm>

#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {
namespace {

constexpr int kNumLayers = 2;
constexpr int kHeads = 3;
constexpr int kDim = 64;
constexpr int kBlockLen = 4;
constexpr int kNumBlocks = 5;

struct Mode {
  uint32_t mode;
  const char* name;
  kvx_format_t format;  // of its rows
};
const Mode kModes[] = {
    {KVX_TURBOMIND_MODE_NONE, "f16", KVX_FORMAT_F16},
    {KVX_TURBOMIND_MODE_INT4, "int4", KVX_FORMAT_INT4_AFFINE},
    {KVX_TURBOMIND_MODE_INT8, "int8", KVX_FORMAT_INT8_AFFINE},
    {KVX_TURBOMIND_MODE_FP4_MX, "FP4 MX", KVX_FORMAT_MXFP4_G16},
    {KVX_TURBOMIND_MODE_FP4_NV, "FP4 NV", KVX_FORMAT_NVFP4},
};

bool has_scale_pool(const Mode& mode) {
  return mode.mode == KVX_TURBOMIND_MODE_FP4_MX || mode.mode == KVX_TURBOMIND_MODE_FP4_NV;
}

// [layer][head][K: block_len rows][V: likewise], and behind a layer's rows its parameters in the
// same order; or a scale block [layer][head][token][K's][V's].
struct Geometry {
  explicit Geometry(const Mode& mode)
      : row_bytes(facts_of(mode.format).code_bytes(kDim)),
        scale_bytes(facts_of(mode.format).has_scale() ? facts_of(mode.format).groups_per_row(kDim) *
                                                            facts_of(mode.format).scale_bytes()
                                                      : 0),
        in_scale_block(has_scale_pool(mode)) {}

  int64_t rows_of_layer() const { return int64_t{kHeads} * 2 * kBlockLen * row_bytes; }
  int64_t scales_of_layer() const { return int64_t{kHeads} * 2 * kBlockLen * scale_bytes; }
  int64_t layer_bytes() const { return rows_of_layer() + (in_scale_block ? 0 : scales_of_layer()); }
  int64_t block_bytes() const { return kNumLayers * layer_bytes(); }
  int64_t scale_block_bytes() const { return in_scale_block ? kNumLayers * scales_of_layer() : 0; }
  int64_t code_at(int layer, int head, int side, int token) const {
    return layer * layer_bytes() + ((head * 2 + side) * kBlockLen + token) * int64_t{row_bytes};
  }
  // In the data block, or in the scale block.
  int64_t scale_at(int layer, int head, int side, int token) const {
    if (in_scale_block) {
      return layer * scales_of_layer() +
             ((head * kBlockLen + token) * 2 + side) * int64_t{scale_bytes};
    }
    return layer * layer_bytes() + rows_of_layer() +
           ((head * 2 + side) * kBlockLen + token) * int64_t{scale_bytes};
  }

  int row_bytes;
  int scale_bytes;  // of a row: scale and zero, or one a group
  bool in_scale_block;
};

struct Pools {
  Pools(Memory& memory, const Mode& mode) : geometry(mode) {
    pools.size = sizeof pools;
    pools.mode = mode.mode;
    pools.dtype = KVX_DTYPE_F16;
    pools.num_layers = kNumLayers;
    pools.num_kv_heads = kHeads;
    pools.head_dim = kDim;
    pools.block_len = kBlockLen;
    pools.num_blocks = kNumBlocks;
    data = memory.add("data pool", kNumBlocks * geometry.block_bytes()).data();
    pools.data = data;
    if (!geometry.in_scale_block) return;
    scales = memory.add("scale pool", kNumBlocks * geometry.scale_block_bytes()).data();
    pools.scales = scales;
  }

  Geometry geometry;
  kvx_turbomind_pools_t pools{};
  uint8_t* data = nullptr;
  uint8_t* scales = nullptr;
};

// A layer of the pools, as the provider describes it.
struct PoolLayer {
  PoolLayer(const Provider& provider, const kvx_turbomind_pools_t& pools, uint32_t index) {
    k.size = v.size = sizeof k;
    require_status(provider.turbomind_layer(&pools, index, &k, &v), KVX_STATUS_OK,
                   "kvx_turbomind_layer");
    run.size = sizeof run;
    run.num_heads = kHeads;
    run.k = &k;
    run.v = &v;
    layer.size = sizeof layer;
    layer.block_size = kBlockLen;
    layer.num_blocks = static_cast<decltype(layer.num_blocks)>(pools.num_blocks);
    layer.num_kv_heads = kHeads;
    layer.num_runs = 1;
    layer.runs = &runs;
  }
  PoolLayer(const PoolLayer&) = delete;

  kvx_side_t k{};
  kvx_side_t v{};
  kvx_head_run_t run{};
  const kvx_head_run_t* runs = &run;
  kvx_layer_t layer{};
};

std::vector<float> row_of(int side, int64_t token, int head) {
  return some_row(static_cast<uint64_t>((token * 8 + head) * 2 + side), kDim);
}

void append_tokens(const Provider& provider, Memory& memory, const kvx_layer_t& layer,
                   const std::vector<int64_t>& slots) {
  const auto num_tokens = static_cast<int64_t>(slots.size());
  FloatTensor k(memory, "k", KVX_DTYPE_F32, num_tokens, kHeads, kDim);
  FloatTensor v(memory, "v", KVX_DTYPE_F32, num_tokens, kHeads, kDim);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int h = 0; h < kHeads; ++h) {
      k.set_row(t, h, row_of(0, t, h));
      v.set_row(t, h, row_of(1, t, h));
    }
  }
  kvx_append_args_t args{};
  args.size = sizeof args;
  args.layer = &layer;
  args.k = &k.rows;
  args.v = &v.rows;
  args.num_tokens = num_tokens;
  args.slot_dtype = KVX_DTYPE_S64;
  args.slots = add_indices(memory, "slots", slots, KVX_DTYPE_S64);
  memory.take_picture();
  require_status(provider.append(&args, nullptr), KVX_STATUS_OK, "kvx_append");
}

void expect_bytes(Memory& memory, uint8_t* at, const std::vector<uint8_t>& bytes) {
  for (size_t i = 0; i < bytes.size(); ++i) *memory.expect(at + i) = bytes[i];
}

void sizes_of_blocks(const Provider& provider, const Mode& mode) {
  Memory memory;
  const Pools given(memory, mode);
  kvx_turbomind_sizes_t sizes{};
  sizes.size = sizeof sizes;
  require_status(provider.turbomind_block_sizes(&given.pools, &sizes), KVX_STATUS_OK,
                 "kvx_turbomind_block_sizes");
  const Geometry& geometry = given.geometry;
  require(sizes.block_bytes == static_cast<uint64_t>(geometry.block_bytes()),
          "block_bytes is {}, expected {}", sizes.block_bytes, geometry.block_bytes());
  require(sizes.scale_block_bytes == static_cast<uint64_t>(geometry.scale_block_bytes()),
          "scale_block_bytes is {}, expected {}", sizes.scale_block_bytes,
          geometry.scale_block_bytes());
  const uint32_t bits = static_cast<uint32_t>(geometry.row_bytes) * 8 / kDim;
  require(sizes.q_bits == bits, "q_bits is {}, expected {}", sizes.q_bits, bits);
}

// In the last layer, whose rows lie behind the others'.
void appends_to_pools(const Provider& provider, const Mode& mode) {
  const std::vector<int64_t> slots = {7, 0, 19, -1, 8, 9};
  const FormatFacts& facts = facts_of(mode.format);
  constexpr int kLayer = kNumLayers - 1;
  Memory memory;
  const Pools given(memory, mode);
  const PoolLayer target(provider, given.pools, kLayer);
  append_tokens(provider, memory, target.layer, slots);
  const Geometry& geometry = given.geometry;
  for (size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < 0) continue;
    const int64_t block = slots[t] / kBlockLen;
    const int token = static_cast<int>(slots[t] % kBlockLen);
    uint8_t* in_data = given.data + block * geometry.block_bytes();
    uint8_t* in_scales =
        geometry.in_scale_block ? given.scales + block * geometry.scale_block_bytes() : in_data;
    for (int h = 0; h < kHeads; ++h) {
      for (int side = 0; side < 2; ++side) {
        const CodedRow row = encode_row(facts, row_of(side, static_cast<int64_t>(t), h), 1);
        expect_bytes(memory, in_data + geometry.code_at(kLayer, h, side, token), row.codes);
        expect_bytes(memory, in_scales + geometry.scale_at(kLayer, h, side, token), row.scales);
      }
    }
  }
  require_unchanged_but_expected(memory, "kvx_append to a pool");
}

// Blocks that pointers name, in an order of their own, are read as the ids that they become.
void finds_blocks_by_pointers(const Provider& provider, const Mode& mode) {
  const std::vector<int32_t> order = {3, 0, 4};
  const FormatFacts& facts = facts_of(mode.format);
  Memory memory;
  const Pools given(memory, mode);
  std::vector<const void*> blocks, scale_blocks;
  for (const int32_t id : order) {
    blocks.push_back(given.data + id * given.geometry.block_bytes());
    if (given.geometry.in_scale_block) {
      scale_blocks.push_back(given.scales + id * given.geometry.scale_block_bytes());
    }
  }
  const void* const* of_scales = scale_blocks.empty() ? nullptr : scale_blocks.data();
  const auto num_blocks = static_cast<int64_t>(order.size());
  kvx_turbomind_pools_t found = given.pools;
  found.data = found.scales = nullptr;
  found.num_blocks = 0;
  require_status(provider.turbomind_find_pools(&found, blocks.data(), of_scales, num_blocks),
                 KVX_STATUS_OK, "kvx_turbomind_find_pools");
  std::vector<int32_t> ids(order.size(), -1);
  require_status(
      provider.turbomind_block_ids(&found, blocks.data(), of_scales, num_blocks, ids.data()),
      KVX_STATUS_OK, "kvx_turbomind_block_ids");
  const PoolLayer layer(provider, found, 0);
  std::vector<int64_t> slots;
  for (int t = 0; t < 10; ++t) {
    slots.push_back(int64_t{ids[static_cast<size_t>(t / kBlockLen)]} * kBlockLen + t % kBlockLen);
  }
  append_tokens(provider, memory, layer.layer, slots);
  const uint8_t* first_row = static_cast<const uint8_t*>(blocks[0]);
  const CodedRow expected = encode_row(facts, row_of(0, 0, 0), 1);
  require(std::equal(expected.codes.begin(), expected.codes.end(), first_row),
          "token 0 was not written to the block that its pointer names");

  const VerbTable table(memory, {.blocks = {{ids.begin(), ids.end()}}, .lengths = {10}}, kBlockLen);
  FloatTensor k(memory, "gathered k", KVX_DTYPE_F32, 10, kHeads, kDim);
  FloatTensor v(memory, "gathered v", KVX_DTYPE_F32, 10, kHeads, kDim);
  kvx_gather_args_t args{};
  args.size = sizeof args;
  args.layer = &layer.layer;
  args.block_table = &table.table;
  args.seq_lens = &table.seq_lens;
  args.k = &k.rows;
  args.v = &v.rows;
  args.num_ranges = 1;
  require_status(provider.gather(&args, nullptr), KVX_STATUS_OK, "kvx_gather");
  for (int t = 0; t < 10; ++t) {
    for (int h = 0; h < kHeads; ++h) {
      for (int side = 0; side < 2; ++side) {
        const CodedRow row = encode_row(facts, row_of(side, t, h), 1);
        require((side == 0 ? k : v).row(t, h) == decode_row(facts, row, kDim, 1),
                "{} of token {}, head {} is not the appended row", side == 0 ? "k" : "v", t, h);
      }
    }
  }
}

}  // namespace

std::vector<Check> turbomind_checks() {
  std::vector<Check> checks;
  for (const Mode& mode : kModes) {
    Features needs;
    needs.add(kFormats, mode.format).add(kIoDtypes, KVX_DTYPE_F32);
    needs.add(kIndexDtypes, KVX_DTYPE_S64);
    const auto add = [&](Section section, const char* what, auto ask) {
      checks.push_back({.section = section,
                        .name = fmt::format("TurboMind's pools, {}, {}", mode.name, what),
                        .needs = needs,
                        .ask = [&mode, ask](const Provider& p) { ask(p, mode); },
                        .is_exported = [](const Provider& p) { return p.turbomind_layer; }});
    };
    add(Section::kFormatWords, "sizes of blocks", sizes_of_blocks);
    add(Section::kAppend, "append", appends_to_pools);
    add(Section::kGather, "pointer tables", finds_blocks_by_pointers);
  }
  return checks;
}

}  // namespace kvx::conformance
