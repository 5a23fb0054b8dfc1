// Section 6.6: scales of every granularity, in writes to caches of 8-bit floats.
#include <cstring>

#include "tools/conformance/numbers.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

constexpr kvx_dtype_t kEightBits[] = {KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2};
constexpr kvx_dtype_t kFullPrecision[] = {KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16};

Features needs_of(kvx_dtype_t cache, kvx_scale_granularity_t granularity) {
  Features needs = nhd().needs();
  needs.add(kCacheDtypes, cache).add(kScaleGranularities, granularity);
  for (const kvx_dtype_t io : kFullPrecision) needs.add(kIoDtypes, io);
  return needs.add(kIndexDtypes, KVX_DTYPE_S64);
}

std::string name_of(kvx_scale_granularity_t granularity) {
  constexpr const char* kNames[] = {"none", "PER_TENSOR", "PER_BLOCK", "PER_HEAD",
                                    "PER_BLOCK_HEAD"};
  return kNames[granularity];
}

// Scales are powers of two and numbers the codes' own: value = code * scale has one right code.
void write_scaled(const Provider& provider, kvx_dtype_t cache, ScaleCase scale) {
  for (const kvx_dtype_t io : kFullPrecision) {
    for (const kvx_dtype_t scale_dtype : kFullPrecision) {
      if (scale.by_pointer && scale_dtype != KVX_DTYPE_F32) continue;
      for (const int gap : {0, 3}) {
        WriteCase write_case = {.geometry = {5, 4, 3, 16}};
        write_case.set_types(cache, io);
        write_case.scale = scale;
        write_case.scale.dtype = scale_dtype;
        write_case.scale.gap = gap;
        WriteCall(write_case).must_move(provider.write_kv);
      }
    }
  }
}

void writes_unscaled(const Provider& provider, kvx_dtype_t cache) {
  for (const kvx_dtype_t io : kFullPrecision) {
    WriteCase write_case;
    write_case.set_types(cache, io);
    WriteCall(write_case).must_move(provider.write_kv);
    WriteCall empty(write_case);  // no descriptor at all, size included
    empty.write.k_scale_desc = {};
    empty.write.v_scale_desc = {};
    empty.must_move(provider.write_kv);
  }
}

// Scales are not read where they are not needed: equal types are copied.
void copies_codes(const Provider& provider, kvx_dtype_t cache) {
  WriteCase write_case;
  write_case.set_types(cache, cache);
  write_case.scale = {.granularity = KVX_SCALE_PER_TENSOR};
  WriteCall(write_case).must_move(provider.write_kv);
}

// To the nearest code, ties to the even one, under a scale of 2.
void rounds_to_nearest_even(const Provider& provider) {
  struct Rounding {
    float value;
    uint8_t code;
  };
  constexpr Rounding kRoundings[] = {{2.125f, 0x38}, {2.375f, 0x3A}, {2.126f, 0x39},
                                     {-2.4f, 0xBA},  {0.0f, 0x00},   {-0.0f, 0x80},
                                     {864.f, 0x7E},  {-0.25f, 0xA0}};
  WriteCase write_case = {.geometry = {1, 1, 1, 8}, .slots = {0}};
  write_case.set_types(KVX_DTYPE_F8_E4M3, KVX_DTYPE_F32);
  write_case.scale = {.granularity = KVX_SCALE_PER_TENSOR};
  WriteCall call(write_case);
  const float two = 2;
  memcpy(const_cast<void*>(call.write.k_scale_desc.data), &two, sizeof two);
  for (int64_t d = 0; d < 8; ++d) {
    memcpy(io_element(call.write.io.key, 0, 0, d), &kRoundings[d].value, sizeof(float));
  }
  require_status(provider.write_kv(&call.cache, &call.write, nullptr), KVX_STATUS_OK, "the write");
  const auto* found = static_cast<const uint8_t*>(call.cache.k.data);
  for (int64_t d = 0; d < 8; ++d) {
    require(found[d] == kRoundings[d].code,
            "{} with a scale of 2 becomes E4M3 {:#04x}, expected {:#04x}", kRoundings[d].value,
            found[d], kRoundings[d].code);
  }
}

using Spoil = void (*)(WriteCall&);

void must_refuse(const Provider& provider, kvx_status_t expected, const char* what, Spoil spoil) {
  WriteCase write_case;
  write_case.set_types(KVX_DTYPE_F8_E4M3, KVX_DTYPE_F32);
  write_case.scale = {.granularity = KVX_SCALE_PER_BLOCK_HEAD};
  WriteCall call(write_case);
  spoil(call);
  call.must_refuse(provider.write_kv, expected, std::string("a write with ") + what);
}

void refuses_descriptors(const Provider& provider) {
  constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;
  must_refuse(provider, kInvalid, "one dimension PER_BLOCK_HEAD",
              [](WriteCall& c) { c.write.k_scale_desc.ndim = 1; });
  must_refuse(provider, kInvalid, "another number of blocks",
              [](WriteCall& c) { --c.write.v_scale_desc.shape[0]; });
  must_refuse(provider, kInvalid, "another number of heads",
              [](WriteCall& c) { ++c.write.k_scale_desc.shape[1]; });
  must_refuse(provider, kInvalid, "scales of S32",
              [](WriteCall& c) { c.write.k_scale_desc.dtype = KVX_DTYPE_S32; });
  must_refuse(provider, kInvalid, "granularity NONE beside data",
              [](WriteCall& c) { c.write.v_scale_desc.granularity = KVX_SCALE_NONE; });
  must_refuse(provider, kInvalid, "a scale_desc below its size",
              [](WriteCall& c) { c.write.k_scale_desc.size = 100; });
}

// Zero, negative, infinite and NaN, in the last scale that the call reads.
void refuses_numbers(const Provider& provider) {
  for (const uint32_t bits : {0u, 0x80000000u, 0xBF800000u, 0x7F800000u, 0x7FC00000u}) {
    WriteCase write_case = {.geometry = {5, 4, 2, 16}, .slots = {3, 19}};
    write_case.set_types(KVX_DTYPE_F8_E4M3, KVX_DTYPE_F32);
    write_case.scale = {.granularity = KVX_SCALE_PER_BLOCK_HEAD};
    WriteCall call(write_case);
    auto* scales = static_cast<uint32_t*>(const_cast<void*>(call.write.v_scale_desc.data));
    scales[9] = bits;
    call.must_refuse(provider.write_kv, KVX_STATUS_INVALID_ARGUMENT,
                     fmt::format("a write with a scale of bits {:#010x}", bits));
  }
}

}  // namespace

std::vector<Check> scale_checks() {
  std::vector<Check> checks;
  for (const kvx_dtype_t cache : kEightBits) {
    const std::string type = conformance::name_of(cache);
    for (const auto granularity : {KVX_SCALE_PER_TENSOR, KVX_SCALE_PER_BLOCK, KVX_SCALE_PER_HEAD,
                                   KVX_SCALE_PER_BLOCK_HEAD}) {
      checks.push_back({Section::kScales, fmt::format("write {} {}", type, name_of(granularity)),
                        needs_of(cache, granularity), [=](const Provider& p) {
                          write_scaled(p, cache, {.granularity = granularity});
                        }});
    }
    checks.push_back({Section::kScales, fmt::format("write {} with k_scale and v_scale", type),
                      needs_of(cache, KVX_SCALE_PER_TENSOR), [=](const Provider& p) {
                        write_scaled(p, cache,
                                     {.granularity = KVX_SCALE_PER_TENSOR, .by_pointer = true});
                      }});
    checks.push_back({Section::kScales, fmt::format("write {} without a scale", type),
                      needs_of(cache, KVX_SCALE_NONE),
                      [=](const Provider& p) { writes_unscaled(p, cache); }});
    checks.push_back({Section::kScales, fmt::format("write {} as it is, beside a scale", type),
                      needs_of(cache, KVX_SCALE_PER_TENSOR).add(kIoDtypes, cache),
                      [=](const Provider& p) { copies_codes(p, cache); }});
  }
  checks.push_back({Section::kScales, "write F8_E4M3 rounds to nearest even",
                    needs_of(KVX_DTYPE_F8_E4M3, KVX_SCALE_PER_TENSOR), rounds_to_nearest_even});
  checks.push_back({Section::kScales, "refuse scale descriptors that do not fit",
                    needs_of(KVX_DTYPE_F8_E4M3, KVX_SCALE_PER_BLOCK_HEAD), refuses_descriptors});
  checks.push_back({Section::kScales, "refuse scales that are not positive and finite",
                    needs_of(KVX_DTYPE_F8_E4M3, KVX_SCALE_PER_BLOCK_HEAD), refuses_numbers});
  return checks;
}

}  // namespace kvx::conformance
