// 1.2: kvx_append stores rows in their slots, in the bytes of their format.
#include <cmath>
#include <cstring>
#include <limits>

#include "tools/conformance/numbers.hpp"
#include "tools/conformance/transforms.hpp"
#include "tools/conformance/verb_layer.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

struct AppendCase {
  LayerCase layer = {};
  std::vector<int64_t> slots = {7, 0, 19, -1, 8, 9, 10, 11, 3, -7, 12};
  kvx_dtype_t slot_dtype = KVX_DTYPE_S64;
  kvx_dtype_t io = KVX_DTYPE_F32;
  int64_t gap = 0;  // elements between the rows of K and V
};

// An append with all its memory.
struct AppendCall {
  AppendCall(const Provider& provider, const AppendCase& append_case)
      : given(append_case),
        target(provider, memory, given.layer),
        k(memory, "k", given.io, num_tokens(), given.layer.num_heads, given.layer.k_dim, given.gap),
        v(memory, "v", given.io, num_tokens(), given.layer.num_heads,
          std::max(given.layer.v_dim, 1), given.gap) {
    for (int64_t t = 0; t < num_tokens(); ++t) {
      for (int64_t h = 0; h < given.layer.num_heads; ++h) {
        const auto place = static_cast<uint64_t>(t * 16 + h);
        k.set_row(t, h, some_row(1000 + place, k.head_dim));
        v.set_row(t, h, some_row(9000 + place, v.head_dim));
      }
    }
    args.size = sizeof args;
    args.layer = &target.layer;
    args.k = &k.rows;
    if (has_own_v()) args.v = &v.rows;
    args.num_tokens = num_tokens();
    args.slot_dtype = given.slot_dtype;
    args.slots = add_indices(memory, "slots", given.slots, given.slot_dtype);
  }
  AppendCall(const AppendCall&) = delete;

  int64_t num_tokens() const { return static_cast<int64_t>(given.slots.size()); }
  bool has_own_v() const { return given.layer.v_dim != 0 && !given.layer.v_is_prefix; }
  RowPlace place_of(int64_t slot, int64_t head) const {
    return {slot / given.layer.block_size, slot % given.layer.block_size, head};
  }

  // Updates the expected bytes to those of a correct append.
  void expect_rows() {
    for (int64_t t = 0; t < num_tokens(); ++t) {
      const int64_t slot = given.slots[static_cast<size_t>(t)];
      if (slot < 0 || slot >= given.layer.num_slots()) continue;
      for (int64_t h = 0; h < given.layer.num_heads; ++h) {
        target.expect(Side::kKey, place_of(slot, h), k.row(t, h));
        if (has_own_v()) target.expect(Side::kValue, place_of(slot, h), v.row(t, h));
      }
    }
  }

  void must_append(const Provider& provider, const std::string& what = "kvx_append") {
    memory.take_picture();
    expect_rows();
    require_status(provider.append(&args, nullptr), KVX_STATUS_OK, what);
    require_unchanged_but_expected(memory, what);
  }

  void must_refuse(const Provider& provider, kvx_status_t expected, const std::string& what) {
    memory.take_picture();
    require_status(provider.append(&args, nullptr), expected, what);
    require_unchanged_but_expected(memory, what + ", refused");
  }

  AppendCase given;
  Memory memory;
  VerbLayer target;
  FloatTensor k;
  FloatTensor v;
  kvx_append_args_t args{};
};

// An odd head_dim, as far as the format allows.
int odd_dim(kvx_format_t format) {
  const int multiple = facts_of(format).head_dim_multiple;
  return 32 / multiple * multiple + multiple;
}

void appends_in_order(const Provider& provider, kvx_format_t format, Order order) {
  for (const kvx_dtype_t slot_dtype : kIndexTypes) {
    for (const int dim : {64, odd_dim(format)}) {
      if (order == Order::kFragments && dim != 64) continue;  // fragments of four bytes
      AppendCase append_case;
      append_case.layer.set_formats(format, format).order = order;
      append_case.layer.k_dim = append_case.layer.v_dim = dim;
      append_case.slot_dtype = slot_dtype;
      AppendCall(provider, append_case).must_append(provider);
    }
  }
}

void appends_under_given_scales(const Provider& provider, kvx_format_t format, ScaleFrom scales) {
  for (const Order order : {Order::kNhd, Order::kHnd}) {
    AppendCase append_case;
    append_case.layer.set_formats(format, format).order = order;
    append_case.layer.scales = scales;
    AppendCall(provider, append_case).must_append(provider);
  }
}

// Appends one block in one call and a second one token by token, its largest values first, so that
// the page-shared scale stays that of the first token.
void shares_a_pages_scale(const Provider& provider, kvx_format_t format) {
  AppendCase whole;
  whole.layer.set_formats(format, format).scales = ScaleFrom::kPage;
  whole.slots = {4, 5, 6, 7};
  AppendCall call(provider, whole);
  call.memory.take_picture();
  for (const Side side : {Side::kKey, Side::kValue}) {
    const FloatTensor& rows = side == Side::kKey ? call.k : call.v;
    for (int64_t h = 0; h < whole.layer.num_heads; ++h) {
      // The largest number of each channel in the block, coded as one row, makes the scales.
      std::vector<float> largest(static_cast<size_t>(rows.head_dim));
      for (int64_t t = 0; t < 4; ++t) {
        for (int d = 0; d < rows.head_dim; ++d) {
          float& at = largest[static_cast<size_t>(d)];
          at = std::max(at, std::fabs(rows.get(t, h, d)));
        }
      }
      const FormatFacts& facts = call.target.facts(side, h);
      const float tensor = call.target.tensor_scale(side, h);
      const std::vector<uint8_t> scales = encode_row(facts, largest, tensor).scales;
      for (int64_t t = 0; t < 4; ++t) {
        call.target.expect_coded(side, {1, t, h},
                                 {encode_codes(facts, rows.row(t, h), scales, tensor), scales});
      }
    }
  }
  require_status(provider.append(&call.args, nullptr), KVX_STATUS_OK, "kvx_append of a block");
  require_unchanged_but_expected(call.memory, "kvx_append of a block");
}

void appends_heads_of_two_formats(const Provider& provider, kvx_format_t k, kvx_format_t v) {
  for (const Order order : {Order::kNhd, Order::kRecord, Order::kPages}) {
    AppendCase append_case;
    append_case.layer.set_formats(k, v).order = order;
    append_case.layer.two_runs = true;
    append_case.layer.v_dim = 96;
    AppendCall(provider, append_case).must_append(provider);
  }
  AppendCase k_alone;
  k_alone.layer.set_formats(k, v).v_dim = 0;
  AppendCall(provider, k_alone).must_append(provider);
}

void appends_a_latent_row(const Provider& provider, kvx_format_t format) {
  AppendCase append_case;
  append_case.layer.set_formats(format, format).v_is_prefix = true;
  append_case.layer.k_dim = 96;
  AppendCall call(provider, append_case);
  call.must_append(provider);
  call.args.v = &call.v.rows;
  call.must_refuse(provider, KVX_STATUS_INVALID_ARGUMENT, "a v beside a V that is a part of K");
}

void reads_rows_of(const Provider& provider, kvx_dtype_t io) {
  for (const int64_t gap : {0, 24}) {
    AppendCase append_case;
    append_case.layer.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_BF16);
    append_case.io = io;
    append_case.gap = gap;
    AppendCall(provider, append_case).must_append(provider);
  }
}

// Runs a v1 write through kvx_append, so that the checks of v1's layouts cover it.
thread_local const Provider* provider_of_write = nullptr;

kvx_status_t write_by_append(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, void*) {
  kvx_layer_t layer{};
  layer.size = sizeof layer;
  layer.cache = cache;
  if (write->k_scale_desc.data != nullptr) {
    layer.k_scale = &write->k_scale_desc;
    layer.v_scale = &write->v_scale_desc;
  }
  const kvx_rows_t k = rows_of_v1(write->io.key);
  const kvx_rows_t v = rows_of_v1(write->io.value);
  kvx_append_args_t args{};
  args.size = sizeof args;
  args.layer = &layer;
  args.k = &k;
  args.v = &v;
  args.num_tokens = write->io.num_tokens;
  args.slot_dtype = static_cast<uint32_t>(write->slots.dtype);
  args.slots = write->slots.slots;
  return provider_of_write->append(&args, nullptr);
}

void appends_to_a_v1_cache(const Provider& provider, const Arrangement& arrangement) {
  provider_of_write = &provider;
  for (const kvx_dtype_t dtype : {KVX_DTYPE_F16, KVX_DTYPE_F32}) {
    for (const int64_t gap : {0, 16}) {
      WriteCase write_case = {.arrangement = arrangement};
      write_case.set_types(dtype, KVX_DTYPE_F32);
      write_case.gap = gap;
      WriteCall(write_case).must_move(write_by_append);
    }
  }
}

// The scales are powers of two and the numbers codes' own: there is one right code.
void appends_to_a_v1_fp8_cache(const Provider& provider, kvx_dtype_t cache,
                               kvx_scale_granularity_t granularity) {
  provider_of_write = &provider;
  for (const kvx_dtype_t io : {KVX_DTYPE_F32, KVX_DTYPE_F16}) {
    for (const int gap : {0, 3}) {
      WriteCase write_case = {.geometry = {5, 4, 3, 16}};
      write_case.set_types(cache, io);
      write_case.scale = {.granularity = granularity, .gap = gap};
      WriteCall(write_case).must_move(write_by_append);
    }
  }
}

void applies_transforms(const Provider& provider) {
  AppendCase append_case;
  append_case.layer.k_dim = 96;
  AppendCall call(provider, append_case);
  const auto num_heads = static_cast<int64_t>(append_case.layer.num_heads);
  const Transform k(call.memory, "K", num_heads, 96, /*num_offset_blocks=*/3);
  const Transform v(call.memory, "V", num_heads, 64, 0);
  call.target.layer.k_transform = &k.transform;
  call.target.layer.v_transform = &v.transform;
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < call.num_tokens(); ++t) positions.push_back(t);
  call.args.positions = call.memory.add_list("positions", positions);
  call.memory.take_picture();
  for (int64_t t = 0; t < call.num_tokens(); ++t) {
    const int64_t slot = append_case.slots[static_cast<size_t>(t)];
    if (slot < 0) continue;
    for (int64_t h = 0; h < num_heads; ++h) {
      const int64_t block = t / append_case.layer.block_size;
      call.target.expect(Side::kKey, call.place_of(slot, h), k.apply(call.k.row(t, h), h, block));
      call.target.expect(Side::kValue, call.place_of(slot, h), v.apply(call.v.row(t, h), h, 0));
    }
  }
  require_status(provider.append(&call.args, nullptr), KVX_STATUS_OK, "kvx_append");
  require_unchanged_but_expected(call.memory, "kvx_append with transforms");
  call.args.positions = nullptr;
  call.must_refuse(provider, KVX_STATUS_INVALID_ARGUMENT, "a block_offset without positions");
}

// ---- slots

void lets_the_later_token_stay(const Provider& provider) {
  AppendCase append_case;
  append_case.layer.set_formats(KVX_FORMAT_F16, KVX_FORMAT_F16);
  append_case.slots = {5, 6, 5, 5, 6};
  AppendCall(provider, append_case).must_append(provider);
}

void refuses_slots_beyond(const Provider& provider) {
  AppendCase append_case;
  append_case.slots = {0, 1, 20, 2};
  AppendCall call(provider, append_case);
  call.must_refuse(provider, KVX_STATUS_OUT_OF_RANGE, "slot 20 of 20");
}

void counts_slots_beyond(const Provider& provider) {
  for (const kvx_dtype_t slot_dtype : kIndexTypes) {
    AppendCase append_case;
    append_case.slots = {0, 20, 2, 1000000, 3};
    append_case.slot_dtype = slot_dtype;
    AppendCall call(provider, append_case);
    auto* beyond = call.memory.add_list("out_of_range_slots", std::vector<uint64_t>{40});
    call.args.out_of_range_slots = beyond;
    call.memory.take_picture();
    call.expect_rows();
    const uint64_t expected = 42;
    memcpy(call.memory.expect(beyond), &expected, 1);
    require_status(provider.append(&call.args, nullptr), KVX_STATUS_OK, "kvx_append");
    require(*beyond == expected, "out_of_range_slots is {}, expected 40 and 2 more", *beyond);
    require_unchanged_but_expected(call.memory, "kvx_append that counts slots beyond");
  }
}

void takes_no_tokens(const Provider& provider) {
  AppendCase append_case;
  AppendCall call(provider, append_case);
  call.args.num_tokens = 0;
  call.args.slots = nullptr;
  call.must_refuse(provider, KVX_STATUS_OK, "no tokens");
}

// ---- NaN and infinities

void counts_values_without_codes(const Provider& provider) {
  AppendCase append_case;
  append_case.layer.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_INT8).scales = ScaleFrom::kTensor;
  append_case.slots = {2};
  AppendCall call(provider, append_case);
  std::vector<float> row = call.k.row(0, 1);
  row[3] = std::nanf("");
  row[17] = -std::numeric_limits<float>::infinity();
  call.k.set_row(0, 1, row);
  auto* nonfinite = call.memory.add_list("nonfinite_inputs", std::vector<uint64_t>{7});
  call.args.nonfinite_inputs = nonfinite;
  call.memory.take_picture();
  row[3] = row[17] = 0;  // as code 0
  for (int64_t h = 0; h < 3; ++h) {
    call.target.expect(Side::kKey, {0, 2, h}, h == 1 ? row : call.k.row(0, h));
    call.target.expect(Side::kValue, {0, 2, h}, call.v.row(0, h));
  }
  *call.memory.expect(nonfinite) = 9;
  require_status(provider.append(&call.args, nullptr), KVX_STATUS_OK, "kvx_append");
  require_unchanged_but_expected(call.memory, "kvx_append of NaN and infinity");
}

// ---- the caller's threads

struct BackwardThreads {
  int calls = 0;
};

void run_backwards(void* user, uint32_t num_tasks, void (*task)(void*, uint32_t), void* context) {
  ++static_cast<BackwardThreads*>(user)->calls;
  for (uint32_t i = num_tasks; i-- > 0;) task(context, i);
}

void takes_an_executor(const Provider& provider) {
  AppendCase append_case;
  append_case.layer.num_blocks = 64;
  append_case.layer.k_dim = append_case.layer.v_dim = 256;
  append_case.layer.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_INT8);
  append_case.slots.clear();
  for (int64_t t = 0; t < 250; ++t) append_case.slots.push_back(t);
  AppendCall call(provider, append_case);
  BackwardThreads threads;
  kvx_executor_t executor{};
  executor.size = sizeof executor;
  executor.num_threads = 3;
  executor.user = &threads;
  executor.parallel_for = run_backwards;
  call.args.executor = &executor;
  call.must_append(provider, "kvx_append in the caller's threads");
}

// ---- errors

void refuses_bad_arguments(const Provider& provider) {
  const auto refuse = [&provider](const std::string& what, kvx_status_t expected, auto spoil) {
    AppendCase append_case;
    append_case.layer.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_INT8);
    AppendCall call(provider, append_case);
    spoil(call);
    call.must_refuse(provider, expected, what);
  };
  using Call = AppendCall;
  constexpr kvx_status_t kInvalid = KVX_STATUS_INVALID_ARGUMENT;
  refuse("a size of 4", kInvalid, [](Call& c) { c.args.size = 4; });
  refuse("a null layer", kInvalid, [](Call& c) { c.args.layer = nullptr; });
  refuse("a null k", kInvalid, [](Call& c) { c.args.k = nullptr; });
  refuse("a null v of a layer with V", kInvalid, [](Call& c) { c.args.v = nullptr; });
  refuse("null slots", kInvalid, [](Call& c) { c.args.slots = nullptr; });
  refuse("F32 slots", kInvalid, [](Call& c) { c.args.slot_dtype = KVX_DTYPE_F32; });
  refuse("-1 tokens", kInvalid, [](Call& c) { c.args.num_tokens = -1; });
  refuse("k of S32", kInvalid, [](Call& c) { c.k.rows.dtype = KVX_DTYPE_S32; });
  refuse("k without data", kInvalid, [](Call& c) { c.k.rows.data = nullptr; });
  refuse("a negative stride of v", kInvalid, [](Call& c) { c.v.rows.token_stride = -64; });
  refuse("k over the cache", kInvalid, [](Call& c) {
    c.k.rows.data = const_cast<kvx_side_t*>(c.target.layer.runs[0]->k)->codes;
  });
  refuse("no blocks", kInvalid, [](Call& c) { c.target.layer.num_blocks = 0; });
  refuse("a block_size of 0", kInvalid, [](Call& c) { c.target.layer.block_size = 0; });
  refuse("more heads than the runs have", kInvalid, [](Call& c) { ++c.target.layer.num_kv_heads; });
  refuse("runs with more heads than there are", kInvalid,
         [](Call& c) { --c.target.layer.num_kv_heads; });
  refuse("a run without K", kInvalid,
         [](Call& c) { const_cast<kvx_head_run_t*>(c.target.layer.runs[0])->k = nullptr; });
  const auto side_of = [](Call& c) { return const_cast<kvx_side_t*>(c.target.layer.runs[0]->k); };
  refuse("null codes", kInvalid, [&](Call& c) { side_of(c)->codes = nullptr; });
  refuse("null scales", kInvalid, [&](Call& c) { side_of(c)->scales = nullptr; });
  refuse("a null spec", kInvalid, [&](Call& c) { side_of(c)->spec = nullptr; });
  refuse("a head_dim of 0", kInvalid, [&](Call& c) { side_of(c)->head_dim = 0; });
  refuse("computed scales that lie over each other", KVX_STATUS_UNSUPPORTED,
         [&](Call& c) { side_of(c)->scale_head_stride = 0; });
  refuse("codes that lie over each other", KVX_STATUS_UNSUPPORTED,
         [&](Call& c) { side_of(c)->code_token_stride = 1; });
  refuse("unknown flags of a side", KVX_STATUS_INCOMPATIBLE,
         [&](Call& c) { side_of(c)->flags = 1u << 30; });
}

// A struct of a later version, with a tail of zeros or another tail.
void guards_its_struct(const Provider& provider) {
  AppendCall call(provider, {});
  struct Longer {
    kvx_append_args_t args;
    uint64_t later;
  } longer = {call.args, 0};
  longer.args.size = sizeof longer;
  call.memory.take_picture();
  call.expect_rows();
  require_status(provider.append(&longer.args, nullptr), KVX_STATUS_OK, "a tail of zeros");
  require_unchanged_but_expected(call.memory, "a tail of zeros");
  longer.later = 1;
  require_status(provider.append(&longer.args, nullptr), KVX_STATUS_INCOMPATIBLE,
                 "a tail that is not zero");
}

}  // namespace

std::vector<Check> append_checks() {
  std::vector<Check> checks;
  const auto add = [&checks](std::string name, Features needs, auto ask) {
    needs.add(kIndexDtypes, KVX_DTYPE_S32).add(kIndexDtypes, KVX_DTYPE_S64);
    checks.push_back(
        {Section::kAppend, "append " + std::move(name), needs, [ask](const Provider& provider) {
           require(provider.append != nullptr, "kvx_append is not exported");
           ask(provider);
         }});
  };
  const auto needs_of_formats = [](std::initializer_list<kvx_format_t> formats) {
    Features needs;
    for (const kvx_format_t format : formats) needs.add(kFormats, format);
    return needs;
  };
  struct NamedOrder {
    Order order;
    const char* name;
  };
  constexpr NamedOrder kOrders[] = {{Order::kNhd, "NHD"},
                                    {Order::kHnd, "HND"},
                                    {Order::kRecord, "records"},
                                    {Order::kGaps, "with gaps"},
                                    {Order::kFragments, "in fragments"},
                                    {Order::kPages, "to pages"},
                                    {Order::kVllmNhd, "as vLLM, NHD"},
                                    {Order::kVllmHnd, "as vLLM, HND"},
                                    {Order::kFlashInfer, "as FlashInfer, HND"},
                                    {Order::kTurboMind, "as TurboMind"}};
  for (const FormatFacts& facts : all_formats()) {
    const kvx_format_t format = facts.format;
    for (const NamedOrder& order : kOrders) {
      LayerCase layer;
      layer.set_formats(format, format).order = order.order;
      add(fmt::format("{} {}", facts.name, order.name), layer.needs(),
          [format, order](const Provider& p) { appends_in_order(p, format, order.order); });
    }
    const Features needs = needs_of_formats({format});
    LayerCase latent;
    latent.set_formats(format, format).v_is_prefix = true;
    add(fmt::format("{} of a latent cache", facts.name), latent.needs(),
        [format](const Provider& p) { appends_a_latent_row(p, format); });
    if (!facts.has_scale() || facts.is_affine) continue;
    add(fmt::format("{} under a scale for all", facts.name), needs,
        [format](const Provider& p) { appends_under_given_scales(p, format, ScaleFrom::kTensor); });
    add(fmt::format("{} under a scale a head", facts.name), needs,
        [format](const Provider& p) { appends_under_given_scales(p, format, ScaleFrom::kHead); });
    add(fmt::format("{} under a page's scales", facts.name), needs,
        [format](const Provider& p) { shares_a_pages_scale(p, format); });
  }
  for (const auto& [k, v] : {std::pair(KVX_FORMAT_INT8, KVX_FORMAT_NVFP4),
                             std::pair(KVX_FORMAT_BF16, KVX_FORMAT_INT4_AFFINE)}) {
    add(fmt::format("heads of {} and {}", facts_of(k).name, facts_of(v).name),
        needs_of_formats({k, v}),
        [k = k, v = v](const Provider& p) { appends_heads_of_two_formats(p, k, v); });
  }
  for (const kvx_dtype_t io : {KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16}) {
    add(fmt::format("rows of {}", name_of(io)),
        needs_of_formats({KVX_FORMAT_INT8, KVX_FORMAT_BF16}),
        [io](const Provider& p) { reads_rows_of(p, io); });
  }
  for (const Arrangement& arrangement : arrangements()) {
    Features needs = arrangement.needs();
    needs.add(kFormats, KVX_FORMAT_F16).add(kFormats, KVX_FORMAT_F32);
    if (arrangement.k_pack != 0 || arrangement.view == Arrangement::View::kDimsFirst) {
      needs.add_flags(kTraits, KVX_TRAIT_FRAGMENTED_ROWS);
    }
    add("to a v1 cache, " + arrangement.name, needs,
        [arrangement](const Provider& p) { appends_to_a_v1_cache(p, arrangement); });
  }
  for (const auto& [dtype, format] : {std::pair(KVX_DTYPE_F8_E4M3, KVX_FORMAT_FP8_E4M3),
                                      std::pair(KVX_DTYPE_F8_E5M2, KVX_FORMAT_FP8_E5M2)}) {
    constexpr std::pair<kvx_scale_granularity_t, const char*> kScales[] = {
        {KVX_SCALE_PER_TENSOR, "tensor"},
        {KVX_SCALE_PER_BLOCK, "block"},
        {KVX_SCALE_PER_HEAD, "head"},
        {KVX_SCALE_PER_BLOCK_HEAD, "block and head"}};
    for (const auto& [granularity, name] : kScales) {
      Features needs = needs_of_formats({format});
      needs.add(kCacheDtypes, dtype).add(kScaleGranularities, granularity);
      add(fmt::format("to a v1 cache of {}, a scale a {}", facts_of(format).name, name), needs,
          [dtype = dtype, granularity = granularity](const Provider& p) {
            appends_to_a_v1_fp8_cache(p, dtype, granularity);
          });
    }
  }
  const Features f32 = needs_of_formats({KVX_FORMAT_F32});
  const Features int8 = needs_of_formats({KVX_FORMAT_INT8});
  add("with transforms", f32, applies_transforms);
  add("of equal slots", needs_of_formats({KVX_FORMAT_F16}), lets_the_later_token_stay);
  add("refuses slots beyond, having written nothing", f32, refuses_slots_beyond);
  add("counts slots beyond and writes none", f32, counts_slots_beyond);
  add("of no tokens", f32, takes_no_tokens);
  add("counts values that codes cannot represent", int8, counts_values_without_codes);
  add("in the caller's threads", int8, takes_an_executor);
  add("refuses bad arguments", int8, refuses_bad_arguments);
  add("of a struct of a later version", f32, guards_its_struct);
  return checks;
}

}  // namespace kvx::conformance
