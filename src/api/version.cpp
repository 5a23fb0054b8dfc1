// kvx_get_version: which version of the C ABI this library speaks.
#include "api/call.hpp"

namespace {

constexpr kvx_version_t kVersion11{sizeof(kvx_version_t), 1, 1, 0};
constexpr kvx_version_t kVersionNow{sizeof(kvx_version_t), KVX_ABI_VERSION_MAJOR,
                                    KVX_ABI_VERSION_MINOR, KVX_ABI_VERSION_PATCH};

}  // namespace

extern "C" kvx_status_t kvx_get_version(kvx_version_t* version) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    if (version == nullptr) return kvx::invalid_argument("version is null");
    // Callers of 1.1 had no duty to set size: for them the answer is the version that they know.
    const bool knows_only_11 = version->size == 0;
    if (!knows_only_11 && version->size < sizeof(kvx_version_t)) {
      return kvx::invalid_argument("version.size is {}; expected 0 or at least {}", version->size,
                                   sizeof(kvx_version_t));
    }
    *version = knows_only_11 ? kVersion11 : kVersionNow;
    return {};
  });
}
