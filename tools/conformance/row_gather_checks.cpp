// 1.2: kvx_gather decodes stored rows to floats: formats, ranges, tables, and errors.
#include <cstring>

#include "tools/conformance/gather_call.hpp"
#include "tools/conformance/transforms.hpp"
#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {
namespace {

// Ranges of sequences. Empty lists: all tokens of every sequence.
struct Ranges {
  std::vector<int32_t> sequences;
  std::vector<int64_t> first_tokens;
  std::vector<int64_t> num_tokens;
  std::vector<int64_t> first_rows;
};

struct RowGatherCase {
  LayerCase layer = {};
  TableCase table = {.blocks = {{3, 0, 1}, {2}, {4, 4}}, .lengths = {10, 0, 7}};
  Ranges ranges = {};
  kvx_dtype_t io = KVX_DTYPE_F32;
  int64_t gap = 0;
};

// A gather from a layer that this program has filled.
struct RowGatherCall {
  RowGatherCall(const Provider& provider, const RowGatherCase& gather_case)
      : given(gather_case),
        source(provider, memory, given.layer),
        table(memory, given.table, given.layer.block_size),
        k(memory, "k", given.io, 24, given.layer.num_heads, given.layer.k_dim, given.gap),
        v(memory, "v", given.io, 24, given.layer.num_heads, given.layer.v_dim, given.gap) {
    source.fill();
    args.size = sizeof args;
    args.layer = &source.layer;
    args.block_table = &table.table;
    args.seq_lens = &table.seq_lens;
    args.k = &k.rows;
    args.v = &v.rows;
    args.num_ranges = table.table.seq_count * table.table.beam_width;
    Ranges& ranges = given.ranges;
    if (ranges.sequences.empty()) {
      int64_t row = 0;
      for (size_t s = 0; s < given.table.lengths.size(); ++s) {
        add_range(static_cast<int32_t>(s), 0, given.table.lengths[s], row);
        row += given.table.lengths[s];
      }
      return;
    }
    args.num_ranges = static_cast<uint32_t>(ranges.sequences.size());
    args.sequences = memory.add_list("sequences", ranges.sequences);
    args.first_tokens = memory.add_list("first_tokens", ranges.first_tokens);
    args.num_tokens = memory.add_list("num_tokens", ranges.num_tokens);
    args.first_rows = memory.add_list("first_rows", ranges.first_rows);
  }
  RowGatherCall(const RowGatherCall&) = delete;

  void add_range(int32_t sequence, int64_t first, int64_t count, int64_t row) {
    given.ranges.sequences.push_back(sequence);
    given.ranges.first_tokens.push_back(first);
    given.ranges.num_tokens.push_back(count);
    given.ranges.first_rows.push_back(row);
  }

  // change(numbers, head, position) transforms a decoded row.
  template <class Change>
  void must_gather(const Provider& provider, Change change) {
    memory.take_picture();
    for (size_t r = 0; r < given.ranges.sequences.size(); ++r) {
      const auto& blocks = given.table.blocks[static_cast<size_t>(given.ranges.sequences[r])];
      for (int64_t i = 0; i < given.ranges.num_tokens[r]; ++i) {
        const int64_t token = given.ranges.first_tokens[r] + i;
        const int64_t block = blocks[static_cast<size_t>(token / given.layer.block_size)];
        for (int64_t h = 0; h < given.layer.num_heads; ++h) {
          const RowPlace place = {block, token % given.layer.block_size, h};
          const int64_t row = given.ranges.first_rows[r] + i;
          for (const Side side : {Side::kKey, Side::kValue}) {
            const FloatTensor& out = side == Side::kKey ? k : v;
            if ((side == Side::kKey ? args.k : args.v) == nullptr) continue;
            std::vector<float> numbers =
                decode_row(source.facts(side, h), source.stored(side, place), out.head_dim,
                           source.tensor_scale(side, h));
            out.expect_row(memory, row, h, change(std::move(numbers), side, h, token));
          }
        }
      }
    }
    require_status(provider.gather(&args, nullptr), KVX_STATUS_OK, "kvx_gather");
    require_unchanged_but_expected(memory, "kvx_gather");
  }
  void must_gather(const Provider& provider) {
    must_gather(provider, [](std::vector<float> row, Side, int64_t, int64_t) { return row; });
  }

  void must_refuse(const Provider& provider, kvx_status_t expected, const std::string& what) {
    memory.take_picture();
    require_status(provider.gather(&args, nullptr), expected, what);
    require_unchanged_but_expected(memory, what + ", refused");
  }

  RowGatherCase given;
  Memory memory;
  VerbLayer source;
  VerbTable table;
  FloatTensor k;
  FloatTensor v;
  kvx_gather_args_t args{};
};

void gathers_in_every_order(const Provider& provider, kvx_format_t format) {
  for (const Order order :
       {Order::kNhd, Order::kHnd, Order::kRecord, Order::kGaps, Order::kPages, Order::kVllmNhd,
        Order::kVllmHnd, Order::kFlashInfer, Order::kTurboMind}) {
    RowGatherCase gather_case;
    gather_case.layer.set_formats(format, format).order = order;
    gather_case.layer.v_dim = 96;
    RowGatherCall(provider, gather_case).must_gather(provider);
  }
}

void gathers_in_parts(const Provider& provider, kvx_format_t format) {
  RowGatherCase gather_case;
  gather_case.layer.set_formats(format, format).order = Order::kFragments;
  RowGatherCall(provider, gather_case).must_gather(provider);
}

void gathers_a_prefix(const Provider& provider, kvx_format_t format) {
  RowGatherCase gather_case;
  gather_case.layer.set_formats(format, format).v_is_prefix = true;
  gather_case.layer.k_dim = 96;
  RowGatherCall(provider, gather_case).must_gather(provider);
}

void reads_given_scales(const Provider& provider, kvx_format_t format) {
  for (const ScaleFrom scales : {ScaleFrom::kTensor, ScaleFrom::kHead}) {
    RowGatherCase gather_case;
    gather_case.layer.set_formats(format, format).scales = scales;
    RowGatherCall(provider, gather_case).must_gather(provider);
  }
}

void gathers_rows_of(const Provider& provider, kvx_dtype_t io) {
  for (const int64_t gap : {0, 24}) {
    RowGatherCase gather_case;
    gather_case.layer.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_BF16).two_runs = true;
    gather_case.io = io;
    gather_case.gap = gap;
    RowGatherCall(provider, gather_case).must_gather(provider);
  }
}

void gathers_by_table(const Provider& provider, const TableCase& table) {
  RowGatherCase gather_case;
  gather_case.layer.set_formats(KVX_FORMAT_F16, KVX_FORMAT_F16);
  gather_case.table = table;
  RowGatherCall(provider, gather_case).must_gather(provider);
}

RowGatherCase some_ranges() {
  RowGatherCase gather_case;
  gather_case.layer.set_formats(KVX_FORMAT_F32, KVX_FORMAT_F16);
  gather_case.ranges = {{0, 2, 0, 1}, {3, 6, 9, 0}, {5, 1, 1, 0}, {10, 2, 0, 23}};
  return gather_case;
}

void gathers_ranges(const Provider& provider) {
  RowGatherCall(provider, some_ranges()).must_gather(provider);
  RowGatherCall one_side(provider, some_ranges());
  one_side.args.k = nullptr;
  one_side.must_gather(provider);
}

void undoes_transforms(const Provider& provider) {
  RowGatherCase gather_case;
  gather_case.layer.k_dim = 96;
  RowGatherCall call(provider, gather_case);
  const Transform k(call.memory, "K", 3, 96, /*num_offset_blocks=*/3);
  const Transform v(call.memory, "V", 3, 64, 0);
  call.source.layer.k_transform = &k.transform;
  call.source.layer.v_transform = &v.transform;
  call.must_gather(provider, [&](std::vector<float> row, Side side, int64_t h, int64_t token) {
    return side == Side::kKey ? k.undo(std::move(row), h, token / 4) : v.undo(std::move(row), h, 0);
  });
}

// ---- v1 gathers through kvx_gather, so that the checks of v1's layouts cover it

thread_local const Provider* provider_of_gather = nullptr;

kvx_status_t gather_by_rows(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, void*) {
  kvx_layer_t layer{};
  layer.size = sizeof layer;
  layer.cache = cache;
  const kvx_rows_t k = rows_of_v1(gather->io.key);
  const kvx_rows_t v = rows_of_v1(gather->io.value);
  Ranges ranges;
  for (uint32_t s = 0; s < gather->seq_lens.seq_count; ++s) {
    const int64_t length = gather->seq_lens.dtype == KVX_DTYPE_S64
                               ? static_cast<const int64_t*>(gather->seq_lens.lengths)[s]
                               : static_cast<const int32_t*>(gather->seq_lens.lengths)[s];
    ranges.sequences.push_back(static_cast<int32_t>(s));
    ranges.first_tokens.push_back(0);
    ranges.num_tokens.push_back(std::min<int64_t>(length, gather->max_seq_len));
    ranges.first_rows.push_back(int64_t{s} * gather->max_seq_len);
  }
  kvx_gather_args_t args{};
  args.size = sizeof args;
  args.layer = &layer;
  args.block_table = &gather->block_table;
  args.seq_lens = &gather->seq_lens;
  args.num_ranges = gather->seq_lens.seq_count;
  args.sequences = ranges.sequences.data();
  args.first_tokens = ranges.first_tokens.data();
  args.num_tokens = ranges.num_tokens.data();
  args.first_rows = ranges.first_rows.data();
  args.k = &k;
  args.v = &v;
  return provider_of_gather->gather(&args, nullptr);
}

void gathers_from_a_v1_cache(const Provider& provider, const Arrangement& arrangement) {
  provider_of_gather = &provider;
  for (const kvx_dtype_t dtype : {KVX_DTYPE_F16, KVX_DTYPE_F32}) {
    GatherCase gather_case = {.arrangement = arrangement};
    gather_case.set_types(dtype, KVX_DTYPE_F32);
    GatherCall(gather_case).must_move(gather_by_rows);
  }
}

// ---- refusals

void refuses_ranges_outside(const Provider& provider) {
  const auto refuse = [&provider](const char* what, auto spoil) {
    RowGatherCase gather_case = some_ranges();
    spoil(gather_case.ranges);
    RowGatherCall(provider, gather_case).must_refuse(provider, KVX_STATUS_OUT_OF_RANGE, what);
  };
  refuse("a range beyond its sequence", [](Ranges& r) { r.num_tokens[0] = 8; });
  refuse("a range behind its sequence", [](Ranges& r) { r.first_tokens[2] = 11; });
  refuse("a range of a sequence that is not there", [](Ranges& r) { r.sequences[1] = 3; });
  refuse("a range of sequence -1", [](Ranges& r) { r.sequences[1] = -1; });
  refuse("a range from token -1", [](Ranges& r) { r.first_tokens[0] = -1; });
  refuse("a range of -1 tokens", [](Ranges& r) { r.num_tokens[0] = -1; });
  refuse("a range to row -1", [](Ranges& r) { r.first_rows[0] = -1; });
  refuse("a range of 2^62 tokens", [](Ranges& r) { r.num_tokens[0] = int64_t{1} << 62; });
}

void refuses_rows_outside(const Provider& provider) {
  constexpr int64_t kRows = 23;  // what the ranges need
  RowGatherCall enough(provider, some_ranges());
  enough.args.num_rows = kRows;
  enough.must_gather(provider);
  for (const int64_t first_row : {kRows - 4, kRows, INT64_MAX}) {  // of five tokens
    RowGatherCase gather_case = some_ranges();
    gather_case.ranges.first_rows[0] = first_row;
    RowGatherCall call(provider, gather_case);
    call.args.num_rows = kRows;
    call.must_refuse(provider, KVX_STATUS_OUT_OF_RANGE,
                     fmt::format("5 tokens to row {} of {}", first_row, kRows));
  }
}

void refuses_blocks_outside(const Provider& provider) {
  for (const int64_t id : {int64_t{5}, int64_t{-1}, int64_t{1} << 30}) {
    RowGatherCase gather_case;
    gather_case.table.blocks[0][1] = id;
    RowGatherCall(provider, gather_case)
        .must_refuse(provider, KVX_STATUS_OUT_OF_RANGE, fmt::format("block {} of 5", id));
  }
  RowGatherCase unread;
  unread.table.blocks[1][0] = 77;  // of a sequence without tokens
  RowGatherCall(provider, unread).must_gather(provider);
}

void refuses_bad_arguments(const Provider& provider) {
  const auto refuse = [&provider](const char* what, auto spoil) {
    RowGatherCall call(provider, some_ranges());
    spoil(call);
    call.must_refuse(provider, KVX_STATUS_INVALID_ARGUMENT, what);
  };
  using Call = RowGatherCall;
  refuse("a size of 4", [](Call& c) { c.args.size = 4; });
  refuse("a null layer", [](Call& c) { c.args.layer = nullptr; });
  refuse("a null table", [](Call& c) { c.args.block_table = nullptr; });
  refuse("null lengths", [](Call& c) { c.args.seq_lens = nullptr; });
  refuse("num_rows of -1", [](Call& c) { c.args.num_rows = -1; });
  refuse("some arrays of ranges", [](Call& c) { c.args.first_rows = nullptr; });
  refuse("k without data", [](Call& c) { c.k.rows.data = nullptr; });
  refuse("k over the cache", [](Call& c) {
    c.k.rows.data = const_cast<kvx_side_t*>(c.source.layer.runs[0]->k)->codes;
  });
}

}  // namespace

std::vector<Check> row_gather_checks() {
  std::vector<Check> checks;
  const auto add = [&checks](std::string name, Features needs, auto ask) {
    needs.add(TableCase().needs());
    checks.push_back(
        {Section::kGather, "gather " + std::move(name), needs, [ask](const Provider& provider) {
           require(provider.gather != nullptr, "kvx_gather is not exported");
           ask(provider);
         }});
  };
  for (const FormatFacts& facts : all_formats()) {
    const kvx_format_t format = facts.format;
    LayerCase layer;
    layer.set_formats(format, format);
    add(fmt::format("{} rows", facts.name), layer.needs(),
        [format](const Provider& p) { gathers_in_every_order(p, format); });
    LayerCase fragments = layer;
    fragments.order = Order::kFragments;
    add(fmt::format("{} rows in fragments", facts.name), fragments.needs(),
        [format](const Provider& p) { gathers_in_parts(p, format); });
    LayerCase latent = layer;
    latent.v_is_prefix = true;
    add(fmt::format("{} of a latent cache", facts.name), latent.needs(),
        [format](const Provider& p) { gathers_a_prefix(p, format); });
    if (!facts.has_scale() || facts.is_affine) continue;
    add(fmt::format("{} under given scales", facts.name), layer.needs(),
        [format](const Provider& p) { reads_given_scales(p, format); });
  }
  LayerCase mixed;
  mixed.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_BF16);
  for (const kvx_dtype_t io : {KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16}) {
    add(fmt::format("rows as {}", name_of(io)), mixed.needs(),
        [io](const Provider& p) { gathers_rows_of(p, io); });
  }
  LayerCase halves;
  halves.set_formats(KVX_FORMAT_F16, KVX_FORMAT_F16);
  for (const kvx_dtype_t dtype : kIndexTypes) {
    const TableCase packed = {.dtype = dtype, .blocks = {{3, 0, 1}, {2}}, .lengths = {9, 4}};
    TableCase tokens = packed;
    tokens.format = KVX_BLOCK_TABLE_RAGGED;
    TableCase pages = tokens;
    pages.pages = true;
    for (const auto& [name, table] : {std::pair("PACKED", packed), std::pair("RAGGED", tokens),
                                      std::pair("RAGGED pages", pages)}) {
      add(fmt::format("by a {} table of {}", name, name_of(dtype)),
          Features(halves.needs()).add(table.needs()),
          [table = table](const Provider& p) { gathers_by_table(p, table); });
    }
  }
  TableCase offsets = {.format = KVX_BLOCK_TABLE_KV_OFFSETS,
                       .blocks = {{3, 0, 1}, {2, 4}, {1}, {3}},
                       .lengths = {9, 7, 4, 4}};
  for (const uint32_t beams : {1u, 2u}) {
    if (beams > 1) offsets.lengths[0] = 7;
    offsets.beams = beams;
    add(fmt::format("by a KV_OFFSETS table of {} beams", beams),
        Features(halves.needs()).add(offsets.needs()),
        [offsets](const Provider& p) { gathers_by_table(p, offsets); });
  }
  for (const Arrangement& arrangement : arrangements()) {
    Features needs = arrangement.needs();
    needs.add(kFormats, KVX_FORMAT_F16).add(kFormats, KVX_FORMAT_F32);
    if (arrangement.k_pack != 0 || arrangement.view == Arrangement::View::kDimsFirst) {
      needs.add_flags(kTraits, KVX_TRAIT_FRAGMENTED_ROWS);
    }
    add("from a v1 cache, " + arrangement.name, needs,
        [arrangement](const Provider& p) { gathers_from_a_v1_cache(p, arrangement); });
  }
  const Features ranges = some_ranges().layer.needs();
  add("ranges", ranges, gathers_ranges);
  add("undoes transforms", ranges, undoes_transforms);
  add("refuses ranges outside", ranges, refuses_ranges_outside);
  add("refuses rows outside", ranges, refuses_rows_outside);
  add("refuses blocks outside", ranges, refuses_blocks_outside);
  add("refuses bad arguments of ranges", ranges, refuses_bad_arguments);
  return checks;
}

}  // namespace kvx::conformance
