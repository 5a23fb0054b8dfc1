// 1.2: kvx_copy_blocks and kvx_transcode copy stored rows to other blocks, formats and orders.
#include "tools/conformance/transforms.hpp"
#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {
namespace {

struct TwoLayers {
  TwoLayers(const Provider& provider, const LayerCase& from_case, const LayerCase& to_case)
      : from(provider, memory, from_case, "from "), to(provider, memory, to_case, "to ") {
    from.fill();
  }
  TwoLayers(const TwoLayers&) = delete;

  // Sets the expected row at the target: a copy of the bytes where both formats agree, otherwise
  // the row decoded and encoded again.
  void expect_row(Side side, const RowPlace& source, const RowPlace& target) {
    const FormatFacts& facts = from.facts(side, source.head);
    const CodedRow row = from.stored(side, source);
    const bool is_alike =
        facts.format == to.facts(side, target.head).format &&
        from.given.scales == to.given.scales &&
        from.tensor_scale(side, source.head) == to.tensor_scale(side, target.head);
    if (is_alike) return to.expect_coded(side, target, row);
    to.expect(side, target,
              decode_row(facts, row, from.head_dim(side), from.tensor_scale(side, source.head)));
  }
  void expect_token(const RowPlace& source, const RowPlace& target) {
    for (int64_t h = 0; h < from.given.num_heads; ++h) {
      expect_row(Side::kKey, {source.block, source.token, h}, {target.block, target.token, h});
      if (to.given.v_is_prefix || to.given.v_dim == 0) continue;
      expect_row(Side::kValue, {source.block, source.token, h}, {target.block, target.token, h});
    }
  }

  Memory memory;
  VerbLayer from;
  VerbLayer to;
};

struct CopyCall : TwoLayers {
  CopyCall(const Provider& provider, const LayerCase& from_case, const LayerCase& to_case)
      : TwoLayers(provider, from_case, to_case) {
    args.size = sizeof args;
    args.num_copies = 3;
    args.from = &from.layer;
    args.to = &to.layer;
    args.from_blocks = memory.add_list("from_blocks", from_blocks);
    args.to_blocks = memory.add_list("to_blocks", to_blocks);
    args.num_tokens = memory.add_list("num_tokens", num_tokens);
  }

  void must_copy(const Provider& provider) {
    memory.take_picture();
    for (size_t i = 0; i < from_blocks.size(); ++i) {
      const int64_t count = args.num_tokens != nullptr ? num_tokens[i] : from.given.block_size;
      for (int64_t t = 0; t < count; ++t) {
        expect_token({from_blocks[i], t, 0}, {to_blocks[i], t, 0});
      }
    }
    require_status(provider.copy_blocks(&args, nullptr), KVX_STATUS_OK, "kvx_copy_blocks");
    require_unchanged_but_expected(memory, "kvx_copy_blocks");
  }
  void must_refuse(const Provider& provider, kvx_status_t expected, const std::string& what) {
    memory.take_picture();
    require_status(provider.copy_blocks(&args, nullptr), expected, what);
    require_unchanged_but_expected(memory, what + ", refused");
  }

  std::vector<int64_t> from_blocks = {3, 0, 2};
  std::vector<int64_t> to_blocks = {0, 4, 1};
  std::vector<int32_t> num_tokens = {4, 3, 0};
  kvx_copy_args_t args{};
};

LayerCase layer_of(kvx_format_t k, kvx_format_t v, Order order = Order::kNhd) {
  LayerCase layer;
  layer.set_formats(k, v).order = order;
  return layer;
}

void copies_as_stored(const Provider& provider, kvx_format_t format) {
  for (const Order to : {Order::kHnd, Order::kRecord, Order::kGaps, Order::kPages, Order::kVllmNhd,
                         Order::kVllmHnd, Order::kFlashInfer, Order::kTurboMind}) {
    CopyCall(provider, layer_of(format, format), layer_of(format, format, to)).must_copy(provider);
  }
  CopyCall whole(provider, layer_of(format, format), layer_of(format, format));
  whole.args.num_tokens = nullptr;
  whole.must_copy(provider);
}

void copies_and_converts(const Provider& provider, kvx_format_t from, kvx_format_t to) {
  CopyCall(provider, layer_of(from, from), layer_of(to, to, Order::kHnd)).must_copy(provider);
}

void refuses_copies_outside(const Provider& provider) {
  const auto refuse = [&provider](const char* what, kvx_status_t expected, auto spoil) {
    CopyCall call(provider, layer_of(KVX_FORMAT_INT8, KVX_FORMAT_INT8),
                  layer_of(KVX_FORMAT_INT8, KVX_FORMAT_F16));
    spoil(call);
    call.must_refuse(provider, expected, what);
  };
  const auto first = [](const int64_t* list) { return const_cast<int64_t*>(list); };
  refuse("from block 5 of 5", KVX_STATUS_OUT_OF_RANGE,
         [&](CopyCall& c) { first(c.args.from_blocks)[2] = 5; });
  refuse("to block -1", KVX_STATUS_OUT_OF_RANGE,
         [&](CopyCall& c) { first(c.args.to_blocks)[2] = -1; });
  refuse("5 tokens of a block of 4", KVX_STATUS_OUT_OF_RANGE,
         [](CopyCall& c) { const_cast<int32_t*>(c.args.num_tokens)[2] = 5; });
  refuse("null from_blocks", KVX_STATUS_INVALID_ARGUMENT,
         [](CopyCall& c) { c.args.from_blocks = nullptr; });
  refuse("a null layer", KVX_STATUS_INVALID_ARGUMENT, [](CopyCall& c) { c.args.to = nullptr; });
  refuse("a size of 4", KVX_STATUS_INVALID_ARGUMENT, [](CopyCall& c) { c.args.size = 4; });
  LayerCase longer = layer_of(KVX_FORMAT_INT8, KVX_FORMAT_INT8);
  longer.block_size = 8;
  CopyCall call(provider, layer_of(KVX_FORMAT_INT8, KVX_FORMAT_INT8), longer);
  call.must_refuse(provider, KVX_STATUS_INVALID_ARGUMENT, "blocks of 4 to blocks of 8 tokens");
}

// ---- transcode

struct TranscodeCall : TwoLayers {
  TranscodeCall(const Provider& provider, const LayerCase& from_case, const LayerCase& to_case,
                kvx_dtype_t slot_dtype = KVX_DTYPE_S64)
      : TwoLayers(provider, from_case, to_case) {
    args.size = sizeof args;
    args.slot_dtype = slot_dtype;
    args.from = &from.layer;
    args.to = &to.layer;
    args.num_tokens = static_cast<int64_t>(from_slots.size());
    args.from_slots = add_indices(memory, "from_slots", from_slots, slot_dtype);
    args.to_slots = add_indices(memory, "to_slots", to_slots, slot_dtype);
  }

  static RowPlace place_of(const VerbLayer& layer, int64_t slot) {
    return {slot / layer.given.block_size, slot % layer.given.block_size, 0};
  }

  void must_transcode(const Provider& provider) {
    memory.take_picture();
    for (size_t t = 0; t < from_slots.size(); ++t) {
      if (from_slots[t] < 0 || to_slots[t] < 0) continue;
      // Decoded and encoded again even where both formats agree: an encoder's rows keep their
      // bytes.
      const RowPlace source = place_of(from, from_slots[t]);
      const RowPlace target = place_of(to, to_slots[t]);
      for (int64_t h = 0; h < from.given.num_heads; ++h) {
        for (const Side side : {Side::kKey, Side::kValue}) {
          if (side == Side::kValue && to.given.v_is_prefix) continue;
          const CodedRow row = from.stored(side, {source.block, source.token, h});
          to.expect(side, {target.block, target.token, h},
                    decode_row(from.facts(side, h), row, from.head_dim(side),
                               from.tensor_scale(side, h)));
        }
      }
    }
    require_status(provider.transcode(&args, nullptr), KVX_STATUS_OK, "kvx_transcode");
    require_unchanged_but_expected(memory, "kvx_transcode");
  }
  void must_refuse(const Provider& provider, kvx_status_t expected, const std::string& what) {
    memory.take_picture();
    require_status(provider.transcode(&args, nullptr), expected, what);
    require_unchanged_but_expected(memory, what + ", refused");
  }

  std::vector<int64_t> from_slots = {2, 3, 4, 19, -1, 0, 9, 11};
  std::vector<int64_t> to_slots = {17, 0, 1, 2, 3, -5, 8, 7};
  kvx_transcode_args_t args{};
};

// Copies to blocks of another size, in another order.
void transcodes(const Provider& provider, kvx_format_t from, kvx_format_t to) {
  LayerCase target = layer_of(to, to, Order::kHnd);
  target.block_size = 8;
  target.num_blocks = 3;
  for (const kvx_dtype_t slot_dtype : kIndexTypes) {
    TranscodeCall(provider, layer_of(from, from), target, slot_dtype).must_transcode(provider);
  }
  for (const Order order : {Order::kPages, Order::kVllmNhd, Order::kTurboMind}) {
    TranscodeCall(provider, layer_of(from, from), layer_of(to, to, order)).must_transcode(provider);
  }
  TranscodeCall(provider, layer_of(from, from, Order::kVllmHnd),
                layer_of(to, to, Order::kFlashInfer))
      .must_transcode(provider);
}

void transcodes_latent_rows(const Provider& provider) {
  LayerCase from = layer_of(KVX_FORMAT_BF16, KVX_FORMAT_BF16);
  from.v_is_prefix = true;
  from.k_dim = 96;
  LayerCase to = from;
  to.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_INT8);
  TranscodeCall(provider, from, to).must_transcode(provider);
  to.v_is_prefix = false;
  TranscodeCall(provider, from, to).must_transcode(provider);
  from.v_is_prefix = false;
  to.v_is_prefix = true;
  TranscodeCall(provider, from, to)
      .must_refuse(provider, KVX_STATUS_UNSUPPORTED, "a V apart into a V that is a part of K");
}

void refuses_bad_transcodes(const Provider& provider) {
  const auto refuse = [&provider](const char* what, kvx_status_t expected, auto spoil) {
    TranscodeCall call(provider, layer_of(KVX_FORMAT_INT8, KVX_FORMAT_INT8),
                       layer_of(KVX_FORMAT_F16, KVX_FORMAT_INT8));
    spoil(call);
    call.must_refuse(provider, expected, what);
  };
  const auto slots = [](const void* list) {
    return static_cast<int64_t*>(const_cast<void*>(list));
  };
  using Call = TranscodeCall;
  refuse("from slot 20 of 20", KVX_STATUS_OUT_OF_RANGE,
         [&](Call& c) { slots(c.args.from_slots)[7] = 20; });
  refuse("to slot 20 of 20", KVX_STATUS_OUT_OF_RANGE,
         [&](Call& c) { slots(c.args.to_slots)[7] = 20; });
  refuse("null slots", KVX_STATUS_INVALID_ARGUMENT, [](Call& c) { c.args.to_slots = nullptr; });
  refuse("-1 tokens", KVX_STATUS_INVALID_ARGUMENT, [](Call& c) { c.args.num_tokens = -1; });
  refuse("F32 slots", KVX_STATUS_INVALID_ARGUMENT,
         [](Call& c) { c.args.slot_dtype = KVX_DTYPE_F32; });
  LayerCase wider = layer_of(KVX_FORMAT_INT8, KVX_FORMAT_INT8);
  wider.k_dim = 96;
  TranscodeCall call(provider, layer_of(KVX_FORMAT_INT8, KVX_FORMAT_INT8), wider);
  call.must_refuse(provider, KVX_STATUS_INVALID_ARGUMENT, "rows of 64 to rows of 96");
}

}  // namespace

std::vector<Check> copy_checks() {
  std::vector<Check> checks;
  const auto add = [&checks](std::string name, Features needs, auto ask) {
    needs.add(kIndexDtypes, KVX_DTYPE_S32).add(kIndexDtypes, KVX_DTYPE_S64);
    checks.push_back({Section::kCopies, std::move(name), needs, [ask](const Provider& provider) {
                        require(provider.copy_blocks != nullptr && provider.transcode != nullptr,
                                "kvx_copy_blocks or kvx_transcode is not exported");
                        ask(provider);
                      }});
  };
  // A ring of conversions: every format is the source once and the target once.
  const std::vector<FormatFacts>& formats = all_formats();
  for (size_t i = 0; i < formats.size(); ++i) {
    const kvx_format_t from = formats[i].format;
    const kvx_format_t to = formats[(i + 1) % formats.size()].format;
    const Features both = layer_of(from, to).needs();
    add(fmt::format("copy {} blocks as they are stored", formats[i].name),
        layer_of(from, from).needs(), [from](const Provider& p) { copies_as_stored(p, from); });
    add(fmt::format("copy {} blocks to {}", formats[i].name, facts_of(to).name), both,
        [from, to](const Provider& p) { copies_and_converts(p, from, to); });
    add(fmt::format("transcode {} to {}", formats[i].name, facts_of(to).name), both,
        [from, to](const Provider& p) { transcodes(p, from, to); });
    add(fmt::format("transcode {} to {}", facts_of(to).name, formats[i].name), both,
        [from, to](const Provider& p) { transcodes(p, to, from); });
  }
  LayerCase latent = layer_of(KVX_FORMAT_BF16, KVX_FORMAT_INT8);
  Features latent_needs = latent.needs();
  latent_needs.add_flags(kTraits, KVX_TRAIT_V_IN_K);
  add("transcode latent rows", latent_needs, transcodes_latent_rows);
  const Features needs = layer_of(KVX_FORMAT_INT8, KVX_FORMAT_F16).needs();
  add("copies refuse blocks and tokens outside", needs, refuses_copies_outside);
  add("transcodes refuse bad arguments", needs, refuses_bad_transcodes);
  return checks;
}

}  // namespace kvx::conformance
