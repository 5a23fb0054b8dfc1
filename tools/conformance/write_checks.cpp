// Sections 4.2, 4.3, 5.2 and 6.8: writes of every layout, type, IO tensor and slot mapping.
#include <cstring>

#include "tools/conformance/numbers.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

void write_all(const Provider& provider, const WriteCase& write_case) {
  for (const kvx_dtype_t slot_dtype : kIndexTypes) {
    for (const Geometry& geometry : {Geometry{}, Geometry{2, 1, 1, 16}, Geometry{7, 3, 3, 48}}) {
      WriteCase variant = write_case;
      variant.slot_dtype = slot_dtype;
      variant.geometry = geometry;
      WriteCall(variant).must_move(provider.write_kv);
    }
  }
}

Features types_needed(kvx_dtype_t cache, kvx_dtype_t io) {
  Features needs;
  needs.add(kCacheDtypes, cache).add(kIoDtypes, io);
  if (cache != io) needs.add_flags(kTraits, KVX_TRAIT_CONVERTS_DTYPES);
  return needs;
}

Features basic_needs() {
  return Features(nhd().needs())
      .add(types_needed(KVX_DTYPE_F16, KVX_DTYPE_F16))
      .add(kIndexDtypes, KVX_DTYPE_S32)
      .add(kIndexDtypes, KVX_DTYPE_S64);
}

void add_layouts(std::vector<Check>& checks) {
  for (const Arrangement& arrangement : arrangements()) {
    for (const kvx_dtype_t dtype : kFloatTypes) {
      WriteCase write_case = {.arrangement = arrangement};
      write_case.set_types(dtype, dtype);
      Features needs = basic_needs().add(arrangement.needs()).add(types_needed(dtype, dtype));
      checks.push_back({Section::kLayouts,
                        fmt::format("write {} {}", name_of(dtype), arrangement.name), needs,
                        [write_case](const Provider& p) { write_all(p, write_case); }});
    }
  }
}

// Numbers that both types represent.
void add_conversions(std::vector<Check>& checks) {
  for (const kvx_dtype_t cache : {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32}) {
    for (const kvx_dtype_t io : {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32}) {
      if (cache == io) continue;
      WriteCase write_case;
      write_case.set_types(cache, io);
      checks.push_back({Section::kTypes, fmt::format("write {} as {}", name_of(io), name_of(cache)),
                        basic_needs().add(types_needed(cache, io)),
                        [write_case](const Provider& p) { write_all(p, write_case); }});
    }
  }
  WriteCase mixed;
  mixed.k_cache = mixed.k_io = KVX_DTYPE_F32;
  checks.push_back({Section::kTypes, "write F32 into K and F16 into V",
                    basic_needs()
                        .add(types_needed(KVX_DTYPE_F32, KVX_DTYPE_F32))
                        .add_flags(kTraits, KVX_TRAIT_MIXED_KV_DTYPES),
                    [mixed](const Provider& p) { write_all(p, mixed); }});
}

// Ties go to the even neighbour: F32 to BF16 and F16, one number a dim.
void rounds_to_nearest_even(const Provider& provider) {
  struct Rounding {
    uint32_t f32;
    uint16_t bf16;
    uint16_t f16;
  };
  constexpr Rounding kRoundings[] = {{0x3F808000, 0x3F80, 0x3C04}, {0x3F818000, 0x3F82, 0x3C0C},
                                     {0x3F808001, 0x3F81, 0x3C04}, {0xBF817FFF, 0xBF81, 0xBC0C},
                                     {0x3F801000, 0x3F80, 0x3C00}, {0x3F803000, 0x3F80, 0x3C02},
                                     {0x3F801001, 0x3F80, 0x3C01}, {0x80000000, 0x8000, 0x8000}};
  for (const bool is_bf16 : {true, false}) {
    WriteCase write_case = {.geometry = {1, 1, 1, 8}, .slots = {0}};
    write_case.set_types(is_bf16 ? KVX_DTYPE_BF16 : KVX_DTYPE_F16, KVX_DTYPE_F32);
    WriteCall call(write_case);
    for (int64_t d = 0; d < 8; ++d) {
      memcpy(io_element(call.write.io.key, 0, 0, d), &kRoundings[d].f32, 4);
    }
    require_status(provider.write_kv(&call.cache, &call.write, nullptr), KVX_STATUS_OK,
                   "the write");
    const auto* found = static_cast<const uint16_t*>(call.cache.k.data);
    for (int64_t d = 0; d < 8; ++d) {
      const uint16_t expected = is_bf16 ? kRoundings[d].bf16 : kRoundings[d].f16;
      require(found[d] == expected, "F32 {:#010x} becomes {} {:#06x}, expected {:#06x}",
              kRoundings[d].f32, is_bf16 ? "BF16" : "F16", found[d], expected);
    }
  }
}

void add_io_forms(std::vector<Check>& checks) {
  const auto add = [&checks](const char* name, uint64_t trait, int64_t sequences, int64_t gap) {
    checks.push_back({Section::kIo, name, basic_needs().add_flags(kTraits, trait),
                      [sequences, gap](const Provider& p) {
                        WriteCase write_case = {.num_sequences = sequences, .gap = gap};
                        WriteCall(write_case).must_move(p.write_kv);
                      }});
  };
  add("write from dense IO", 0, 0, 0);
  add("write from padded IO", KVX_TRAIT_PADDED_WRITE_IO, 2, 0);
  add("write from IO with gaps", KVX_TRAIT_STRIDED_IO, 0, 24);
  add("write from padded IO with gaps", KVX_TRAIT_PADDED_WRITE_IO | KVX_TRAIT_STRIDED_IO, 2, 16);
}

// kvx_launch_*. The hint of prefill is the whole call, and half of it.
void writes_through_launch(const Provider& provider) {
  require(provider.launch_write_kv != nullptr && provider.launch_write_kv_f16 != nullptr &&
              provider.launch_write_kv_prefill != nullptr,
          "the library does not export kvx_launch_write_kv, _f16 and _prefill");
  WriteCall(WriteCase{}).must_move(provider.launch_write_kv);
  WriteCall(WriteCase{}).must_move(provider.launch_write_kv_f16);
  for (const int parts : {1, 2}) {
    WriteCall call(WriteCase{});
    call.memory.take_picture();
    call.expect_moved();
    const auto tokens = static_cast<int32_t>(call.write.io.num_tokens) / parts;
    require_status(provider.launch_write_kv_prefill(&call.cache, &call.write, tokens, nullptr),
                   KVX_STATUS_OK, "kvx_launch_write_kv_prefill");
    require_picture(call.memory, call.cache, call.write.io, "kvx_launch_write_kv_prefill");
  }
  WriteCase f32;
  f32.set_types(KVX_DTYPE_F32, KVX_DTYPE_F32);
  WriteCall(f32).must_refuse(provider.launch_write_kv_f16, KVX_STATUS_UNSUPPORTED,
                             "kvx_launch_write_kv_f16 on F32");
}

// --- slots ---

void skips_negative_slots(const Provider& provider) {
  for (const kvx_dtype_t dtype : kIndexTypes) {
    WriteCase write_case = {.slot_dtype = dtype, .slots = {-1, 3, -2, INT32_MIN, 4, -100}};
    WriteCall(write_case).must_move(provider.write_kv);
    write_case.slots = {-1, -1};
    WriteCall(write_case).must_move(provider.write_kv);
  }
}

void skips_the_invalid_slot(const Provider& provider) {
  for (const kvx_dtype_t dtype : kIndexTypes) {
    for (const int64_t invalid : {int64_t{6}, int64_t{0}, int64_t{-5}, int64_t{19}}) {
      WriteCase write_case = {
          .slot_dtype = dtype, .slots = {0, 6, 19, -5, 7}, .invalid_slot = invalid};
      WriteCall(write_case).must_move(provider.write_kv);
    }
  }
  // An invalid_slot beyond the cache is no error, and one beyond 32 bits equals no S32 slot.
  WriteCall(WriteCase{.slots = {1, 5000000000, 2}, .invalid_slot = 5000000000})
      .must_move(provider.write_kv);
  WriteCall(WriteCase{.slot_dtype = KVX_DTYPE_S32,
                      .slots = {1, 2},
                      .invalid_slot = (int64_t{1} << 32) + 1})
      .must_move(provider.write_kv);
}

void finds_single_slots(const Provider& provider) {
  const Geometry geometry;
  for (int64_t slot = 0; slot < geometry.num_slots(); ++slot) {
    WriteCall(WriteCase{.slots = {slot}}).must_move(provider.write_kv);
  }
}

// The rest of the call may be done or not. Memory outside the cache must not be accessed.
void writes_nothing_outside(const Provider& provider) {
  for (const int64_t slot : {int64_t{20}, int64_t{21}, int64_t{INT32_MAX}, int64_t{1} << 32,
                             (int64_t{1} << 32) + 3, INT64_MAX}) {
    WriteCall call(WriteCase{.slots = {slot}});
    call.memory.take_picture();
    provider.write_kv(&call.cache, &call.write, nullptr);
    require_picture(call.memory, call.cache, call.write.io, fmt::format("slot {}", slot));
  }
}

void reports_slots_outside(const Provider& provider) {
  for (const int64_t slot : {int64_t{20}, int64_t{INT32_MAX}, (int64_t{1} << 32) + 3, INT64_MAX}) {
    WriteCall(WriteCase{.slots = {1, 2, slot, 3}})
        .must_refuse(provider.write_kv, KVX_STATUS_OUT_OF_RANGE,
                     fmt::format("a write with slot {}", slot));
  }
  WriteCall(WriteCase{.slot_dtype = KVX_DTYPE_S32, .slots = {1, 20}})
      .must_refuse(provider.write_kv, KVX_STATUS_OUT_OF_RANGE, "a write with an S32 slot 20");
}

void takes_no_tokens(const Provider& provider) {
  WriteCall call(WriteCase{.slots = {1}});
  call.write.io.num_tokens = call.write.slots.token_count = 0;
  call.write.io.key.shape[0] = call.write.io.value.shape[0] = 0;
  call.write.io.key.data = call.write.io.value.data = nullptr;
  call.write.slots.slots = nullptr;
  call.must_refuse(provider.write_kv, KVX_STATUS_OK, "a write of no tokens");
}

}  // namespace

std::vector<Check> write_checks() {
  std::vector<Check> checks;
  add_layouts(checks);
  add_conversions(checks);
  checks.push_back({Section::kTypes, "write rounds to nearest even",
                    basic_needs()
                        .add(types_needed(KVX_DTYPE_F16, KVX_DTYPE_F32))
                        .add(types_needed(KVX_DTYPE_BF16, KVX_DTYPE_F32)),
                    rounds_to_nearest_even});
  add_io_forms(checks);
  checks.push_back({Section::kLaunch, "launch writes",
                    basic_needs().add_flags(kTraits, KVX_TRAIT_LAUNCH_ON_HOST),
                    writes_through_launch});
  return checks;
}

std::vector<Check> slot_checks() {
  const Features needs = basic_needs();
  return {{Section::kSlots, "write every slot alone", needs, finds_single_slots},
          {Section::kSlots, "skip negative slots", needs, skips_negative_slots},
          {Section::kSlots, "skip invalid_slot, whatever its value", needs, skips_the_invalid_slot},
          {Section::kSlots, "write nothing outside the cache", needs, writes_nothing_outside},
          {Section::kSlots, "report slots outside the cache, having written nothing",
           basic_needs().add_flags(kTraits, KVX_TRAIT_REPORTS_OUT_OF_RANGE), reports_slots_outside},
          {Section::kSlots, "take a write of no tokens", needs, takes_no_tokens}};
}

}  // namespace kvx::conformance
