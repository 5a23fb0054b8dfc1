/* The slow provider's version and features, and its answer to a cache descriptor. */
#include <stddef.h>
#include <string.h>

#include "slow.h"

kvx_status_t kvx_get_version(kvx_version_t* version) {
  if (version == NULL) return KVX_STATUS_INVALID_ARGUMENT;
  const int is_too_small = version->size != 0 && version->size < sizeof *version;
  if (is_too_small && FAULT != VERSION_WRITES_16_BYTES) return KVX_STATUS_INVALID_ARGUMENT;
  version->size = sizeof *version;
  version->abi_major = 1;
  version->abi_minor = 1;
  version->abi_patch = 0;
  return KVX_STATUS_OK;
}

kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache) {
  if (cache == NULL) return KVX_STATUS_INVALID_ARGUMENT;
  struct deferred_error deferred_error = {0};
  const kvx_status_t status = check_cache(cache, &deferred_error);
  if (status != KVX_STATUS_OK) return status;
  return deferred_error.is_unsupported ? KVX_STATUS_UNSUPPORTED : KVX_STATUS_OK;
}

/* Everything that host memory allows, but the kernels' entry points. */
kvx_status_t kvx_query_features(kvx_features_t* features) {
  const uint64_t floats = 1u << KVX_DTYPE_F16 | 1u << KVX_DTYPE_BF16 | 1u << KVX_DTYPE_F32 |
                          1u << KVX_DTYPE_F8_E4M3 | 1u << KVX_DTYPE_F8_E5M2;
  if (features == NULL || features->size < 8) return KVX_STATUS_INVALID_ARGUMENT;
  kvx_features_t all;
  memset(&all, 0, sizeof all);
  all.size = features->size < sizeof all ? features->size : (uint32_t)sizeof all;
  all.table_flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX | KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
  all.layouts = 1u << KVX_LAYOUT_BLOCK_NHD | 1u << KVX_LAYOUT_BLOCK_HND |
                1u << KVX_LAYOUT_BLOCK_HND_PACKED | 1u << KVX_LAYOUT_BLOCK_CUSTOM;
  all.cache_dtypes = floats;
  all.io_dtypes = floats;
  all.index_dtypes = 1u << KVX_DTYPE_S32 | 1u << KVX_DTYPE_S64;
  all.table_formats = 1u << KVX_BLOCK_TABLE_PACKED | 1u << KVX_BLOCK_TABLE_RAGGED |
                      1u << KVX_BLOCK_TABLE_KV_OFFSETS;
  all.memory_types = 1u << KVX_MEMORY_HOST;
  all.scale_granularities = 0x1F;
  all.traits = KVX_TRAIT_STRIDED_CACHE | KVX_TRAIT_MIXED_KV_DTYPES | KVX_TRAIT_CONVERTS_DTYPES |
               KVX_TRAIT_SECONDARY_POOL | KVX_TRAIT_BEAMS | KVX_TRAIT_PADDED_WRITE_IO |
               KVX_TRAIT_DENSE_GATHER_IO | KVX_TRAIT_STRIDED_IO | KVX_TRAIT_REPORTS_OUT_OF_RANGE;
  memcpy(features, &all, all.size);
  return KVX_STATUS_OK;
}
