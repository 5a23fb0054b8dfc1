// 1.2: kvx_attend over every format and order, with every feature of the verb.
#include "tools/conformance/attend_call.hpp"

namespace kvx::conformance {
namespace {

// Decode, and prefill after some tokens. One layer has more tokens than a tile.
void attends(const Provider& provider, const AttendCase& attend_case) {
  AttendCase prefill = attend_case;
  prefill.q_lens = {6, 1, 3, 0};
  AttendCall(provider, prefill).must_attend(provider, "prefill");
  if (attend_case.has_tree) return;
  AttendCase decode = attend_case;
  decode.decodes = true;
  decode.q_lens = {1, 1, 1};
  decode.table.blocks.resize(3);
  decode.table.lengths.resize(3);
  AttendCall(provider, decode).must_attend(provider, "decode");
}

void attends_in_every_order(const Provider& provider, kvx_format_t format) {
  for (const Order order :
       {Order::kNhd, Order::kHnd, Order::kRecord, Order::kPages, Order::kVllmNhd, Order::kVllmHnd,
        Order::kFlashInfer, Order::kTurboMind}) {
    AttendCase attend_case;
    attend_case.layer.set_formats(format, format).order = order;
    attends(provider, attend_case);
  }
}

AttendCase case_of(kvx_format_t k, kvx_format_t v) {
  AttendCase attend_case;
  attend_case.layer.set_formats(k, v);
  return attend_case;
}

// 300 tokens of two sequences: longer than any tile, with other sequences' blocks in between.
AttendCase long_case(kvx_format_t format) {
  AttendCase attend_case = case_of(format, format);
  attend_case.layer.num_blocks = 20;
  attend_case.layer.block_size = 16;
  attend_case.table.blocks.assign(2, {});
  for (int64_t i = 0; i < 19; ++i) {
    attend_case.table.blocks[0].push_back(i * 7 % 20);
    attend_case.table.blocks[1].push_back(i * 3 % 20);
  }
  attend_case.table.lengths = {300, 290};
  attend_case.q_lens = {1, 9};
  return attend_case;
}

void attends_in_the_callers_threads(const Provider& provider) {
  AttendCall call(provider, long_case(KVX_FORMAT_INT8));
  kvx_executor_t executor{};
  executor.size = sizeof executor;
  executor.num_threads = 4;
  executor.parallel_for = [](void*, uint32_t num_tasks, void (*task)(void*, uint32_t),
                             void* context) {
    for (uint32_t i = num_tasks; i-- > 0;) task(context, i);
  };
  call.args.executor = &executor;
  call.must_attend(provider);
}

// Table entries of blocks that the window hides may be invalid.
void reads_no_block_before_the_window(const Provider& provider) {
  AttendCase attend_case = case_of(KVX_FORMAT_BF16, KVX_FORMAT_BF16);
  attend_case.window = 3;
  AttendCall call(provider, attend_case);
  auto* ids = static_cast<int32_t*>(const_cast<void*>(call.table.table.indices));
  ids[0] = -1;  // tokens 0 to 3 of sequence 0, whose query sees 7 to 9
  call.must_attend(provider);
}

}  // namespace

std::vector<Check> attend_checks() {
  std::vector<Check> checks;
  const auto add = [&checks](std::string name, const AttendCase& attend_case, auto ask) {
    checks.push_back({Section::kAttend, "attend " + std::move(name), attend_case.needs(),
                      [ask](const Provider& provider) {
                        require(provider.attend != nullptr && provider.attend_workspace != nullptr,
                                "kvx_attend or kvx_attend_workspace is not exported");
                        ask(provider);
                      }});
  };
  const auto add_case = [&add](std::string name, const AttendCase& attend_case) {
    add(std::move(name), attend_case,
        [attend_case](const Provider& provider) { attends(provider, attend_case); });
  };
  for (const FormatFacts& facts : all_formats()) {
    const kvx_format_t format = facts.format;
    add(fmt::format("{}", facts.name), case_of(format, format),
        [format](const Provider& p) { attends_in_every_order(p, format); });
    AttendCase many_tokens = long_case(format);
    add(fmt::format("{}, 300 tokens", facts.name), many_tokens,
        [many_tokens](const Provider& p) { AttendCall(p, many_tokens).must_attend(p); });
    AttendCase fragments = case_of(format, format);
    fragments.layer.order = Order::kFragments;
    add_case(fmt::format("{} in fragments", facts.name), fragments);
    AttendCase latent = case_of(format, format);
    latent.layer.v_is_prefix = true;
    latent.layer.k_dim = 96;
    add_case(fmt::format("{} of a latent cache", facts.name), latent);
    if (!facts.has_scale() || facts.is_affine) continue;
    AttendCase scaled = case_of(format, format);
    scaled.layer.scales = ScaleFrom::kHead;
    add_case(fmt::format("{} under given scales", facts.name), scaled);
  }
  const AttendCase plain = case_of(KVX_FORMAT_INT8, KVX_FORMAT_INT4);
  const auto with = [&plain](auto change) {
    AttendCase changed = plain;
    change(changed);
    return changed;
  };
  add_case("with an LSE", with([](AttendCase& c) { c.has_lse = true; }));
  add_case("with a window", with([](AttendCase& c) { c.window = 3; }));
  add_case("with a window longer than all", with([](AttendCase& c) { c.window = 1000; }));
  add_case("with a softcap", with([](AttendCase& c) {
             c.softcap = 2;
             c.softmax_scale = 1;
           }));
  add_case("with its own scale", with([](AttendCase& c) { c.softmax_scale = 0.25f; }));
  add_case("with sinks", with([](AttendCase& c) { c.has_sinks = c.has_lse = true; }));
  add_case("with a tree mask", with([](AttendCase& c) { c.has_tree = c.has_lse = true; }));
  add_case("with full-precision window", with([](AttendCase& c) { c.has_full_precision = true; }));
  add_case("with transforms", with([](AttendCase& c) { c.has_transforms = c.has_lse = true; }));
  add_case("with heads of two formats", with([](AttendCase& c) { c.layer.two_runs = true; }));
  add_case("with 5 query heads a KV head", with([](AttendCase& c) { c.num_q_heads = 15; }));
  add_case("with a query head a KV head", with([](AttendCase& c) { c.num_q_heads = 3; }));
  add_case("with K wider than V", with([](AttendCase& c) { c.layer.k_dim = 192; }));
  add_case("with V wider than K", with([](AttendCase& c) { c.layer.v_dim = 128; }));
  add_case("with everything at once", with([](AttendCase& c) {
             c.window = 5;
             c.softcap = 4;
             c.has_sinks = c.has_lse = c.has_full_precision = c.has_transforms = c.layer.two_runs =
                 true;
           }));
  for (const kvx_dtype_t io : {KVX_DTYPE_F16, KVX_DTYPE_BF16}) {
    add_case("of rows of " + name_of(io), with([io](AttendCase& c) {
               c.io = io;
               c.gap = 8;
             }));
  }
  for (const kvx_dtype_t dtype : kIndexTypes) {
    const auto ragged = with([dtype](AttendCase& c) {
      c.table.format = KVX_BLOCK_TABLE_RAGGED;
      c.table.dtype = dtype;
    });
    add_case("by a RAGGED table of " + name_of(dtype), ragged);
    AttendCase pages = ragged;
    pages.table.pages = true;
    add_case("by a RAGGED table of pages of " + name_of(dtype), pages);
  }
  add_case("by a KV_OFFSETS table",
           with([](AttendCase& c) { c.table.format = KVX_BLOCK_TABLE_KV_OFFSETS; }));
  const AttendCase beams = with([](AttendCase& c) {
    c.table = {.format = KVX_BLOCK_TABLE_KV_OFFSETS,
               .beams = 2,
               .blocks = {{3, 0, 1}, {3, 2, 4}, {4, 2}, {1, 0}},
               .lengths = {10, 10, 7, 7}};
    c.q_lens = {2, 1, 1, 3};
  });
  add("by a KV_OFFSETS table of 2 beams", beams,
      [beams](const Provider& p) { AttendCall(p, beams).must_attend(p); });
  add("in the caller's threads", long_case(KVX_FORMAT_INT8), attends_in_the_callers_threads);
  add("reads no block before the window", case_of(KVX_FORMAT_BF16, KVX_FORMAT_BF16),
      reads_no_block_before_the_window);
  return checks;
}

// A call that fails must not write anything.
std::vector<Check> bad_attend_checks() {
  const auto ask = [](const Provider& provider) {
    require(provider.attend != nullptr, "kvx_attend is not exported");
    const auto refuse = [&provider](const char* what, kvx_status_t expected, auto spoil) {
      AttendCase attend_case;
      attend_case.layer.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_INT4);
      attend_case.q_lens = {2, 1, 1, 0};
      attend_case.has_full_precision = true;
      AttendCall call(provider, attend_case);
      spoil(call);
      call.must_refuse(provider, expected, what);
    };
    using Call = AttendCall;
    constexpr kvx_status_t kInvalid = KVX_STATUS_INVALID_ARGUMENT;
    constexpr kvx_status_t kOutside = KVX_STATUS_OUT_OF_RANGE;
    const auto ids = [](Call& c) {
      return static_cast<int32_t*>(const_cast<void*>(c.table.table.indices));
    };
    const auto lengths = [](Call& c) {
      return static_cast<int32_t*>(const_cast<void*>(c.table.seq_lens.lengths));
    };
    refuse("a size of 4", kInvalid, [](Call& c) { c.args.size = 4; });
    refuse("a null layer", kInvalid, [](Call& c) { c.args.layer = nullptr; });
    refuse("a null table", kInvalid, [](Call& c) { c.args.block_table = nullptr; });
    refuse("null lengths", kInvalid, [](Call& c) { c.args.seq_lens = nullptr; });
    refuse("a null q", kInvalid, [](Call& c) { c.args.q = nullptr; });
    refuse("a null out", kInvalid, [](Call& c) { c.args.out = nullptr; });
    refuse("7 query heads of 3", kInvalid, [](Call& c) { c.args.num_q_heads = 7; });
    refuse("no query heads", kInvalid, [](Call& c) { c.args.num_q_heads = 0; });
    refuse("a softcap of -1", kInvalid, [](Call& c) { c.args.softcap = -1; });
    refuse("a scale of NaN", kInvalid, [](Call& c) { c.args.softmax_scale = std::nanf(""); });
    refuse("a reserved field", kInvalid, [](Call& c) { c.args.reserved = 1; });
    refuse("a precision that is none", kInvalid, [](Call& c) { c.args.precision = 2; });
    refuse("full-precision window without their layer", kInvalid,
           [](Call& c) { c.args.full_precision = nullptr; });
    refuse("out over the cache", kInvalid, [](Call& c) {
      c.out.rows.data = const_cast<kvx_side_t*>(c.source.layer.runs[0]->k)->codes;
    });
    refuse("q_starts that fall", kInvalid,
           [](Call& c) { const_cast<int32_t*>(c.args.q_starts)[1] = 4; });
    refuse("more queries than tokens", kInvalid, [&](Call& c) { lengths(c)[0] = 1; });
    refuse("a length of -1", kInvalid, [&](Call& c) { lengths(c)[2] = -1; });
    refuse("a length beyond the table", kOutside, [&](Call& c) { lengths(c)[0] = 13; });
    refuse("block 5 of 5", kOutside, [&](Call& c) { ids(c)[1] = 5; });
    refuse("block -1", kOutside, [&](Call& c) { ids(c)[3] = -1; });
  };
  AttendCase needed;
  needed.layer.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_INT4);
  return {{Section::kAttend, "attend refuses bad arguments", needed.needs(), ask}};
}

}  // namespace kvx::conformance
