// kvx_get_version: the version of the C ABI that this library implements.
#include "api/call.hpp"

namespace {

constexpr kvx_version_t kVersion11{sizeof(kvx_version_t), 1, 1, 0};
constexpr kvx_version_t kVersionNow{sizeof(kvx_version_t), KVX_ABI_VERSION_MAJOR,
                                    KVX_ABI_VERSION_MINOR, KVX_ABI_VERSION_PATCH};

}  // namespace

extern "C" kvx_status_t kvx_get_version(kvx_version_t* version) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    if (version == nullptr) return kvx::invalid_argument("version is null");
    // Version 1.1 did not require its callers to set size, so 0 means a caller of 1.1.
    const bool is_caller_of_11 = version->size == 0;
    if (!is_caller_of_11 && version->size < sizeof(kvx_version_t)) {
      return kvx::invalid_argument("version.size is {}; expected 0 or at least {}", version->size,
                                   sizeof(kvx_version_t));
    }
    *version = is_caller_of_11 ? kVersion11 : kVersionNow;
    return {};
  });
}
