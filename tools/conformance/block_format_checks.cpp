// 1.2: formats whose blocks are quantised whole (kvx_features_t.block_formats). What they lose is
// bounded; where the same rows come from does not matter; a part of a block is refused.
#include <cmath>
#include <cstring>

#include "tools/conformance/tensors.hpp"
#include "tools/conformance/verb_layer.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

constexpr uint32_t kBlockSize = 64;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 64;
constexpr int64_t kBlocks = 3;

struct BlockFormat {
  kvx_format_t format;
  const char* name;
  int bits;
  double most_error;  // relative, of rows of random numbers
};
constexpr BlockFormat kBlockFormatFacts[] = {{KVX_FORMAT_INT4_DUAL, "int4_dual", 4, 0.12},
                                             {KVX_FORMAT_INT3_DUAL, "int3_dual", 3, 0.25},
                                             {KVX_FORMAT_INT2_DUAL, "int2_dual", 2, 0.55}};

// Opaque pages of zeros; K and V alike.
struct PagedLayer {
  PagedLayer(const Provider& provider, Memory& memory, kvx_format_t format, const char* name) {
    spec.size = sizeof spec;
    spec.format = format;
    page.size = sizeof page;
    page.block_size = kBlockSize;
    page.k_head_dim = page.v_head_dim = kDim;
    page.k_spec = page.v_spec = &spec;
    require_status(provider.page_bytes_per_token(&page, &bytes_per_token), KVX_STATUS_OK,
                   "kvx_page_bytes_per_token");
    pages =
        &memory.add(name, kBlocks * kHeads * kBlockSize * static_cast<int64_t>(bytes_per_token));
    memset(pages->data(), 0, static_cast<size_t>(pages->size()));
    k.size = v.size = sizeof k;
    require_status(provider.describe_pages(&page, pages->data(), kHeads, &k, &v), KVX_STATUS_OK,
                   "kvx_describe_pages");
    run.size = sizeof run;
    run.num_heads = kHeads;
    run.k = &k;
    run.v = &v;
    layer.size = sizeof layer;
    layer.block_size = kBlockSize;
    layer.num_blocks = kBlocks;
    layer.num_kv_heads = kHeads;
    layer.num_runs = 1;
    layer.runs = &runs;
  }
  PagedLayer(const PagedLayer&) = delete;

  std::vector<uint8_t> bytes() const { return {pages->data(), pages->data() + pages->size()}; }

  kvx_format_spec_t spec{};
  kvx_page_desc_t page{};
  uint64_t bytes_per_token = 0;
  Buffer* pages = nullptr;
  kvx_side_t k{};
  kvx_side_t v{};
  kvx_head_run_t run{};
  const kvx_head_run_t* runs = &run;
  kvx_layer_t layer{};
};

// Rows of blocks 2 and 0, in this order.
std::vector<int64_t> two_blocks() {
  std::vector<int64_t> slots;
  for (const int64_t block : {2, 0}) {
    for (int64_t t = 0; t < kBlockSize; ++t) slots.push_back(block * kBlockSize + t);
  }
  return slots;
}

FloatTensor some_rows(Memory& memory, int64_t num_tokens) {
  FloatTensor rows(memory, "rows", KVX_DTYPE_F32, num_tokens, kHeads, kDim);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      rows.set_row(t, h, some_row(static_cast<uint64_t>(t * kHeads + h), kDim));
    }
  }
  return rows;
}

kvx_status_t append(const Provider& provider, Memory& memory, const kvx_layer_t& layer,
                    const FloatTensor& rows, const std::vector<int64_t>& slots) {
  kvx_append_args_t args{};
  args.size = sizeof args;
  args.layer = &layer;
  args.k = args.v = &rows.rows;
  args.num_tokens = static_cast<int64_t>(slots.size());
  args.slot_dtype = KVX_DTYPE_S64;
  args.slots = add_indices(memory, "slots", slots, KVX_DTYPE_S64);
  return provider.append(&args, nullptr);
}

// The keys of block 2, [kBlockSize, kHeads, kDim].
std::vector<float> gather_block(const Provider& provider, Memory& memory,
                                const kvx_layer_t& layer) {
  const int32_t* table_ids = memory.add_list("block_table", std::vector<int32_t>{2});
  const int32_t* lengths = memory.add_list("lengths", std::vector<int32_t>{kBlockSize});
  kvx_block_table_t table{};
  table.size = sizeof table;
  table.format = KVX_BLOCK_TABLE_PACKED;
  table.index_dtype = KVX_DTYPE_S32;
  table.indices = table_ids;
  table.indices_count = table.seq_count = table.beam_width = table.max_blocks_per_seq = 1;
  kvx_seq_lens_t seq_lens{};
  seq_lens.size = sizeof seq_lens;
  seq_lens.dtype = KVX_DTYPE_S32;
  seq_lens.seq_count = 1;
  seq_lens.lengths = lengths;
  FloatTensor k(memory, "k", KVX_DTYPE_F32, kBlockSize, kHeads, kDim);
  FloatTensor v(memory, "v", KVX_DTYPE_F32, kBlockSize, kHeads, kDim);
  kvx_gather_args_t args{};
  args.size = sizeof args;
  args.layer = &layer;
  args.block_table = &table;
  args.seq_lens = &seq_lens;
  args.num_ranges = 1;
  args.k = &k.rows;
  args.v = &v.rows;
  args.num_rows = kBlockSize;
  require_status(provider.gather(&args, nullptr), KVX_STATUS_OK, "kvx_gather");
  std::vector<float> rows;
  for (int64_t t = 0; t < kBlockSize; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const std::vector<float> row = k.row(t, h);
      rows.insert(rows.end(), row.begin(), row.end());
    }
  }
  return rows;
}

void keeps_whole_blocks(const Provider& provider, const BlockFormat& facts) {
  Memory memory;
  PagedLayer target(provider, memory, facts.format, "pages");
  const int64_t channels = 2 * kDim / kBlockSize;
  const auto expected = static_cast<uint64_t>(2 * (kDim * facts.bits / 8 + 1 + channels));
  require(target.bytes_per_token == expected, "a token takes {} bytes, expected {}",
          target.bytes_per_token, expected);
  const FloatTensor rows = some_rows(memory, 2 * kBlockSize);
  require_status(append(provider, memory, target.layer, rows, two_blocks()), KVX_STATUS_OK,
                 "kvx_append");
  const std::vector<float> found = gather_block(provider, memory, target.layer);
  double error = 0, size = 0;
  for (int64_t t = 0, i = 0; t < kBlockSize; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (const float x : rows.row(t, h)) {
        const double distance = static_cast<double>(found[static_cast<size_t>(i++)]) - x;
        error += distance * distance;
        size += static_cast<double>(x) * x;
      }
    }
  }
  require(std::sqrt(error / size) < facts.most_error, "rows differ by {:.3f} of their size",
          std::sqrt(error / size));

  // By way of rows of 32 bits.
  PagedLayer of_rows(provider, memory, KVX_FORMAT_F32, "rows of 32 bits");
  PagedLayer copied(provider, memory, facts.format, "pages that are copied to");
  require_status(append(provider, memory, of_rows.layer, rows, two_blocks()), KVX_STATUS_OK,
                 "kvx_append");
  kvx_copy_args_t copy{};
  copy.size = sizeof copy;
  copy.from = &of_rows.layer;
  copy.to = &copied.layer;
  copy.num_copies = 2;
  copy.from_blocks = copy.to_blocks = memory.add_list("blocks", std::vector<int64_t>{0, 2});
  require_status(provider.copy_blocks(&copy, nullptr), KVX_STATUS_OK, "kvx_copy_blocks");
  require(copied.bytes() == target.bytes(), "kvx_copy_blocks and kvx_append write other bytes");
}

void refuses_parts(const Provider& provider, const BlockFormat& facts) {
  Memory memory;
  PagedLayer target(provider, memory, facts.format, "pages");
  const FloatTensor rows = some_rows(memory, 2 * kBlockSize);
  const std::vector<uint8_t> before = target.bytes();
  std::vector<int64_t> slots = two_blocks();
  slots.pop_back();
  require_status(append(provider, memory, target.layer, rows, slots), KVX_STATUS_INVALID_ARGUMENT,
                 "63 tokens of a block");
  slots = two_blocks();
  std::swap(slots[3], slots[4]);
  require_status(append(provider, memory, target.layer, rows, slots), KVX_STATUS_INVALID_ARGUMENT,
                 "a block whose tokens are not in order");
  require(target.bytes() == before, "a call that fails has written");
  target.layer.block_size = 16;
  require_status(append(provider, memory, target.layer, rows, {}), KVX_STATUS_INVALID_ARGUMENT,
                 "blocks of 16 tokens");
  target.layer.block_size = kBlockSize;
  target.k.channels = nullptr;
  require_status(append(provider, memory, target.layer, rows, two_blocks()),
                 KVX_STATUS_INVALID_ARGUMENT, "a side without channels");
  require(target.bytes() == before, "a call that fails has written");
}

}  // namespace

std::vector<Check> block_format_checks() {
  std::vector<Check> checks;
  for (const BlockFormat& facts : kBlockFormatFacts) {
    Features needs;
    needs.add(kBlockFormats, facts.format).add(kMemoryTypes, KVX_MEMORY_HOST);
    checks.push_back({Section::kAppend, fmt::format("whole blocks of {}", facts.name), needs,
                      [&facts](const Provider& p) { keeps_whole_blocks(p, facts); }});
    checks.push_back({Section::kAppend, fmt::format("parts of a block of {}", facts.name), needs,
                      [&facts](const Provider& p) { refuses_parts(p, facts); }});
  }
  return checks;
}

}  // namespace kvx::conformance
