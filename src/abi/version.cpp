// kvx_get_version: which version of the C ABI this library speaks.
#include <cstddef>

#include "kvx/kvx_abi.h"

// The layout of v1.1, which never changes.
static_assert(sizeof(kvx_version_t) == 16 && alignof(kvx_version_t) == 4);
static_assert(offsetof(kvx_version_t, size) == 0);
static_assert(offsetof(kvx_version_t, abi_major) == 4);
static_assert(offsetof(kvx_version_t, abi_minor) == 8);
static_assert(offsetof(kvx_version_t, abi_patch) == 12);
static_assert(sizeof(kvx_status_t) == 4);

namespace {

constexpr kvx_version_t kVersion11{sizeof(kvx_version_t), 1, 1, 0};
constexpr kvx_version_t kVersionNow{sizeof(kvx_version_t), KVX_ABI_VERSION_MAJOR,
                                    KVX_ABI_VERSION_MINOR, KVX_ABI_VERSION_PATCH};

}  // namespace

extern "C" kvx_status_t kvx_get_version(kvx_version_t* version) {
  if (version == nullptr) return KVX_STATUS_INVALID_ARGUMENT;
  // Callers of 1.1 had no duty to set size: for them the answer is the version that they know.
  const bool knows_only_11 = version->size == 0;
  if (!knows_only_11 && version->size < sizeof(kvx_version_t)) return KVX_STATUS_INVALID_ARGUMENT;
  *version = knows_only_11 ? kVersion11 : kVersionNow;
  return KVX_STATUS_OK;
}
