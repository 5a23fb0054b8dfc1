// kvx_query_features: what the v1 calls of this build can do on this machine.
#include <algorithm>
#include <cstring>

#include "api/call.hpp"
#include "device/cuda_caller.hpp"
#include "format/list.hpp"

namespace kvx::boundary {
namespace {

constexpr uint64_t bits(std::initializer_list<int> numbers) {
  uint64_t mask = 0;
  for (const int number : numbers) mask |= uint64_t{1} << number;
  return mask;
}

constexpr uint64_t kFloats =
    bits({KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2});

// Formats are numbered from 1.
constexpr uint64_t row_formats() {
  uint64_t mask = 0;
  for (const format::Facts* facts : format::kRowFacts) {
    mask |= uint64_t{1} << (static_cast<int>(facts->id) + 1);
  }
  return mask;
}

constexpr uint64_t kAllFormats = ((uint64_t{1} << format::kNumFormats) - 1) << 1;

constexpr kvx_features_t kFeatures = {
    .size = sizeof(kvx_features_t),
    .table_flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX | KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES,
    .layouts = bits({KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND, KVX_LAYOUT_BLOCK_HND_PACKED,
                     KVX_LAYOUT_BLOCK_CUSTOM}),
    .cache_dtypes = kFloats,
    .io_dtypes = kFloats,
    .index_dtypes = bits({KVX_DTYPE_S32, KVX_DTYPE_S64}),
    .table_formats =
        bits({KVX_BLOCK_TABLE_PACKED, KVX_BLOCK_TABLE_RAGGED, KVX_BLOCK_TABLE_KV_OFFSETS}),
    .memory_types = bits({KVX_MEMORY_HOST}),
    .scale_granularities = bits({KVX_SCALE_NONE, KVX_SCALE_PER_TENSOR, KVX_SCALE_PER_BLOCK,
                                 KVX_SCALE_PER_HEAD, KVX_SCALE_PER_BLOCK_HEAD}),
    .traits = KVX_TRAIT_STRIDED_CACHE | KVX_TRAIT_MIXED_KV_DTYPES | KVX_TRAIT_CONVERTS_DTYPES |
              KVX_TRAIT_SECONDARY_POOL | KVX_TRAIT_BEAMS | KVX_TRAIT_PADDED_WRITE_IO |
              KVX_TRAIT_DENSE_GATHER_IO | KVX_TRAIT_STRIDED_IO | KVX_TRAIT_REPORTS_OUT_OF_RANGE |
              KVX_TRAIT_LAUNCH_ON_HOST | KVX_TRAIT_FRAGMENTED_ROWS | KVX_TRAIT_V_IN_K |
              KVX_TRAIT_ROW_SEGMENTS,
    .formats = row_formats(),
    .block_formats = kAllFormats & ~row_formats(),
};

Status query_features(kvx_features_t* features) {
  if (features == nullptr) return invalid_argument("features is null");
  constexpr uint32_t kLeast = 8;
  if (features->size < kLeast) {
    return invalid_argument("features.size is {}; expected at least {}", features->size, kLeast);
  }
  kvx_features_t answer = kFeatures;
  if (device::check_usable_cuda_device().ok()) {
    answer.memory_types |= bits({KVX_MEMORY_DEVICE, KVX_MEMORY_UNIFIED});
  }
  answer.size = std::min<uint32_t>(features->size, sizeof answer);
  memcpy(features, &answer, answer.size);
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_query_features(kvx_features_t* features) {
  return kvx::boundary::run_call([&] { return kvx::boundary::query_features(features); });
}
