// The features that providers claim, and their names.
#include "tools/conformance/features.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "tools/conformance/row_codec.hpp"

#include "tools/conformance/runner.hpp"

namespace kvx::conformance {
namespace {

struct FeatureName {
  Mask mask;
  uint64_t flag;
  const char* name;
};

constexpr uint64_t bit(int number) {
  return uint64_t{1} << number;
}

constexpr FeatureName kNames[] = {
    {kTableFlags, KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX, "table flag KVCACHEINDEX"},
    {kTableFlags, KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES, "table flag RAGGED_PAGES"},
    {kLayouts, bit(KVX_LAYOUT_BLOCK_NHD), "layout NHD"},
    {kLayouts, bit(KVX_LAYOUT_BLOCK_HND), "layout HND"},
    {kLayouts, bit(KVX_LAYOUT_BLOCK_HND_PACKED), "layout HND_PACKED"},
    {kLayouts, bit(KVX_LAYOUT_BLOCK_CUSTOM), "layout CUSTOM"},
    {kCacheDtypes, bit(KVX_DTYPE_F16), "cache F16"},
    {kCacheDtypes, bit(KVX_DTYPE_BF16), "cache BF16"},
    {kCacheDtypes, bit(KVX_DTYPE_F32), "cache F32"},
    {kCacheDtypes, bit(KVX_DTYPE_F8_E4M3), "cache F8_E4M3"},
    {kCacheDtypes, bit(KVX_DTYPE_F8_E5M2), "cache F8_E5M2"},
    {kIoDtypes, bit(KVX_DTYPE_F16), "IO F16"},
    {kIoDtypes, bit(KVX_DTYPE_BF16), "IO BF16"},
    {kIoDtypes, bit(KVX_DTYPE_F32), "IO F32"},
    {kIoDtypes, bit(KVX_DTYPE_F8_E4M3), "IO F8_E4M3"},
    {kIoDtypes, bit(KVX_DTYPE_F8_E5M2), "IO F8_E5M2"},
    {kIndexDtypes, bit(KVX_DTYPE_S32), "index S32"},
    {kIndexDtypes, bit(KVX_DTYPE_S64), "index S64"},
    {kTableFormats, bit(KVX_BLOCK_TABLE_PACKED), "table PACKED"},
    {kTableFormats, bit(KVX_BLOCK_TABLE_RAGGED), "table RAGGED"},
    {kTableFormats, bit(KVX_BLOCK_TABLE_KV_OFFSETS), "table KV_OFFSETS"},
    {kMemoryTypes, bit(KVX_MEMORY_HOST), "memory HOST"},
    {kMemoryTypes, bit(KVX_MEMORY_DEVICE), "memory DEVICE"},
    {kMemoryTypes, bit(KVX_MEMORY_UNIFIED), "memory UNIFIED"},
    {kScaleGranularities, bit(KVX_SCALE_NONE), "scale NONE"},
    {kScaleGranularities, bit(KVX_SCALE_PER_TENSOR), "scale PER_TENSOR"},
    {kScaleGranularities, bit(KVX_SCALE_PER_BLOCK), "scale PER_BLOCK"},
    {kScaleGranularities, bit(KVX_SCALE_PER_HEAD), "scale PER_HEAD"},
    {kScaleGranularities, bit(KVX_SCALE_PER_BLOCK_HEAD), "scale PER_BLOCK_HEAD"},
    {kTraits, KVX_TRAIT_STRIDED_CACHE, "trait STRIDED_CACHE"},
    {kTraits, KVX_TRAIT_MIXED_KV_DTYPES, "trait MIXED_KV_DTYPES"},
    {kTraits, KVX_TRAIT_CONVERTS_DTYPES, "trait CONVERTS_DTYPES"},
    {kTraits, KVX_TRAIT_SECONDARY_POOL, "trait SECONDARY_POOL"},
    {kTraits, KVX_TRAIT_BEAMS, "trait BEAMS"},
    {kTraits, KVX_TRAIT_PADDED_WRITE_IO, "trait PADDED_WRITE_IO"},
    {kTraits, KVX_TRAIT_DENSE_GATHER_IO, "trait DENSE_GATHER_IO"},
    {kTraits, KVX_TRAIT_STRIDED_IO, "trait STRIDED_IO"},
    {kTraits, KVX_TRAIT_REPORTS_OUT_OF_RANGE, "trait REPORTS_OUT_OF_RANGE"},
    {kTraits, KVX_TRAIT_LAUNCH_ON_HOST, "trait LAUNCH_ON_HOST"},
    {kTraits, KVX_TRAIT_FRAGMENTED_ROWS, "trait FRAGMENTED_ROWS"},
    {kTraits, KVX_TRAIT_V_IN_K, "trait V_IN_K"},
    {kTraits, KVX_TRAIT_ROW_SEGMENTS, "trait ROW_SEGMENTS"},
    {kBlockFormats, bit(KVX_FORMAT_INT4_DUAL), "block format int4_dual"},
    {kBlockFormats, bit(KVX_FORMAT_INT3_DUAL), "block format int3_dual"},
    {kBlockFormats, bit(KVX_FORMAT_INT2_DUAL), "block format int2_dual"},
};

}  // namespace

Features& Features::add(const Features& other) {
  for (int mask = 0; mask < kNumMasks; ++mask) bits_[mask] |= other.bits_[mask];
  return *this;
}

Features operator-(const Features& all, const Features& without) {
  Features rest = all;
  for (int mask = 0; mask < kNumMasks; ++mask) rest.bits_[mask] &= ~without.bits_[mask];
  return rest;
}

std::vector<std::string> Features::names() const {
  std::vector<std::string> names;
  Features unnamed = *this;
  for (const FeatureName& feature : kNames) {
    if ((bits_[feature.mask] & feature.flag) == 0) continue;
    names.emplace_back(feature.name);
    unnamed.bits_[feature.mask] &= ~feature.flag;
  }
  for (const FormatFacts& facts : all_formats()) {
    const uint64_t flag = bit(facts.format);
    if ((bits_[kFormats] & flag) != 0) names.push_back(fmt::format("format {}", facts.name));
    unnamed.bits_[kFormats] &= ~flag;
  }
  for (int mask = 0; mask < kNumMasks; ++mask) {
    if (unnamed.bits_[mask] == 0) continue;
    names.push_back(fmt::format("unknown bits {:#x} of mask {}", unnamed.bits_[mask], mask));
  }
  return names;
}

Features claims_of_v1_1() {
  Features claims;
  for (const FeatureName& feature : kNames) {
    switch (feature.mask) {
      case kTableFlags:
        if (feature.flag == KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX) break;
        continue;  // RAGGED_PAGES came with 1.2
      case kLayouts:
        // The specification does not define the dimensions of CUSTOM.
        if (feature.flag != bit(KVX_LAYOUT_BLOCK_CUSTOM)) break;
        continue;
      case kCacheDtypes:
      case kIoDtypes:  // 8-bit floats, and the scales that they need, are optional
        if (feature.flag <= bit(KVX_DTYPE_F32)) break;
        continue;
      case kScaleGranularities:
        if (feature.flag == bit(KVX_SCALE_NONE)) break;
        continue;
      case kMemoryTypes:
        if (feature.flag == bit(KVX_MEMORY_HOST)) break;
        continue;
      case kBlockFormats:
        continue;  // came with 1.2
      case kTraits:
        if (feature.flag == KVX_TRAIT_DENSE_GATHER_IO) break;  // 6.8: dense IO must be accepted
        continue;
      default:
        break;
    }
    claims.add_flags(feature.mask, feature.flag);
  }
  return claims;
}

Features claims_queried(const Provider& provider) {
  if (provider.query_features == nullptr) {
    throw std::runtime_error("it does not export kvx_query_features; judge it with --claims v1.1");
  }
  kvx_features_t f{};
  const kvx_status_t status = query_in_child(provider, f);
  if (status != KVX_STATUS_OK) {
    throw std::runtime_error(fmt::format("kvx_query_features returns status {}; expected OK 0",
                                         static_cast<int>(status)));
  }
  Features claims;
  const uint64_t masks[kNumMasks] = {
      f.table_flags,  f.layouts,       f.cache_dtypes, f.io_dtypes,
      f.index_dtypes, f.table_formats, f.memory_types, f.scale_granularities,
      f.traits,       f.formats,       f.block_formats};
  for (int mask = 0; mask < kNumMasks; ++mask) {
    claims.add_flags(static_cast<Mask>(mask), masks[mask]);
  }
  return claims;
}

}  // namespace kvx::conformance
