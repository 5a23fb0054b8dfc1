// 1.2: rows of K in two segments (kvx_head_run_t.k_rest), each with a format and memory of its own.
#include "tools/conformance/gather_call.hpp"
#include "tools/conformance/verb_layer.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

constexpr int kFirstDim = 64;
constexpr int kRestDim = 32;

LayerCase segment_of(kvx_format_t format, int dim) {
  LayerCase segment;
  segment.set_formats(format, format);
  segment.k_dim = dim;
  segment.v_dim = 0;
  return segment;
}

// One layer whose rows are two layers' rows, one behind the other.
struct SegmentedLayer {
  SegmentedLayer(const Provider& provider, Memory& memory, kvx_format_t first_format,
                 kvx_format_t rest_format)
      : first(provider, memory, segment_of(first_format, kFirstDim), "first "),
        rest(provider, memory, segment_of(rest_format, kRestDim), "rest ") {
    run = *first.layer.runs[0];
    run.k_rest = rest.layer.runs[0]->k;
    layer = first.layer;
    layer.runs = &runs;
  }
  SegmentedLayer(const SegmentedLayer&) = delete;

  VerbLayer first;
  VerbLayer rest;
  kvx_head_run_t run{};
  const kvx_head_run_t* runs = &run;
  kvx_layer_t layer{};
};

std::vector<float> part_of(const std::vector<float>& row, int first, int count) {
  return {row.begin() + first, row.begin() + first + count};
}

void appends_segments(const Provider& provider, kvx_format_t first, kvx_format_t rest) {
  const std::vector<int64_t> slots = {7, 0, 19, -1, 8, 9};
  Memory memory;
  SegmentedLayer target(provider, memory, first, rest);
  const int64_t heads = target.first.given.num_heads;
  const auto num_tokens = static_cast<int64_t>(slots.size());
  FloatTensor k(memory, "k", KVX_DTYPE_F32, num_tokens, heads, kFirstDim + kRestDim);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      k.set_row(t, h, some_row(static_cast<uint64_t>(t * 16 + h), kFirstDim + kRestDim));
    }
  }
  kvx_append_args_t args{};
  args.size = sizeof args;
  args.layer = &target.layer;
  args.k = &k.rows;
  args.num_tokens = num_tokens;
  args.slot_dtype = KVX_DTYPE_S64;
  args.slots = add_indices(memory, "slots", slots, KVX_DTYPE_S64);
  memory.take_picture();
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int64_t slot = slots[static_cast<size_t>(t)];
    if (slot < 0) continue;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t block_size = target.first.given.block_size;
      const RowPlace place{slot / block_size, slot % block_size, h};
      const std::vector<float> row = k.row(t, h);
      target.first.expect(Side::kKey, place, part_of(row, 0, kFirstDim));
      target.rest.expect(Side::kKey, place, part_of(row, kFirstDim, kRestDim));
    }
  }
  require_status(provider.append(&args, nullptr), KVX_STATUS_OK, "kvx_append");
  require_unchanged_but_expected(memory, "kvx_append");
}

TableCase ten_tokens() {
  return {.blocks = {{3, 0, 1}}, .lengths = {10}};
}

// What a gather of both returns is what a gather of each returns.
void gathers_segments(const Provider& provider, kvx_format_t first, kvx_format_t rest) {
  Memory memory;
  SegmentedLayer source(provider, memory, first, rest);
  source.first.fill();
  source.rest.fill();
  const int64_t heads = source.first.given.num_heads;
  const VerbTable table(memory, ten_tokens(), source.first.given.block_size);
  const auto gather = [&](const kvx_layer_t& layer, FloatTensor& k) {
    kvx_gather_args_t args{};
    args.size = sizeof args;
    args.layer = &layer;
    args.block_table = &table.table;
    args.seq_lens = &table.seq_lens;
    args.k = &k.rows;
    args.num_ranges = 1;
    require_status(provider.gather(&args, nullptr), KVX_STATUS_OK, "kvx_gather");
  };
  FloatTensor both(memory, "both", KVX_DTYPE_F32, 10, heads, kFirstDim + kRestDim);
  FloatTensor of_first(memory, "first", KVX_DTYPE_F32, 10, heads, kFirstDim);
  FloatTensor of_rest(memory, "rest", KVX_DTYPE_F32, 10, heads, kRestDim);
  gather(source.layer, both);
  gather(source.first.layer, of_first);
  gather(source.rest.layer, of_rest);
  for (int64_t t = 0; t < 10; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int d = 0; d < kFirstDim + kRestDim; ++d) {
        const bool is_first = d < kFirstDim;
        const float expected = is_first ? of_first.get(t, h, d) : of_rest.get(t, h, d - kFirstDim);
        require(both.get(t, h, d) == expected,
                "k of token {}, head {}, number {} is {}; the segment alone has {}", t, h, d,
                both.get(t, h, d), expected);
      }
    }
  }
}

}  // namespace

std::vector<Check> segment_checks() {
  std::vector<Check> checks;
  const auto add = [&checks](Section section, std::string name, const Features& needs, auto ask) {
    checks.push_back({section, std::move(name), needs, [ask](const Provider& provider) {
                        require(provider.append != nullptr && provider.gather != nullptr,
                                "kvx_append or kvx_gather is not exported");
                        ask(provider);
                      }});
  };
  const std::vector<FormatFacts>& formats = all_formats();
  for (size_t i = 0; i < formats.size(); ++i) {
    const kvx_format_t first = formats[i].format;
    const kvx_format_t rest = formats[(i + 1) % formats.size()].format;
    Features needs = segment_of(first, kFirstDim).needs();
    needs.add(segment_of(rest, kRestDim).needs()).add_flags(kTraits, KVX_TRAIT_ROW_SEGMENTS);
    needs.add(ten_tokens().needs()).add(kIndexDtypes, KVX_DTYPE_S64);
    needs.add(kIoDtypes, KVX_DTYPE_F32);
    const std::string pair =
        fmt::format("{} and {} numbers of a row", formats[i].name, facts_of(rest).name);
    add(Section::kAppend, "append " + pair, needs,
        [first, rest](const Provider& p) { appends_segments(p, first, rest); });
    add(Section::kGather, "gather " + pair, needs,
        [first, rest](const Provider& p) { gathers_segments(p, first, rest); });
  }
  return checks;
}

}  // namespace kvx::conformance
