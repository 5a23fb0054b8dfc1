// kvx_last_error and kvx_status_name: the text of a failed call.
#include "api/call.hpp"

#include <cstring>

#include "api/guard.hpp"

namespace kvx::boundary {
namespace {

// A fixed buffer, so that keeping an error cannot fail. Longer texts are cut.
thread_local char last_error[1024] = "";

static_assert(static_cast<int>(ErrorCode::kInvalidArgument) == KVX_STATUS_INVALID_ARGUMENT);
static_assert(static_cast<int>(ErrorCode::kUnsupported) == KVX_STATUS_UNSUPPORTED);
static_assert(static_cast<int>(ErrorCode::kOutOfRange) == KVX_STATUS_OUT_OF_RANGE);
static_assert(static_cast<int>(ErrorCode::kIncompatible) == KVX_STATUS_INCOMPATIBLE);
static_assert(static_cast<int>(ErrorCode::kInternal) == KVX_STATUS_INTERNAL_ERROR);

}  // namespace

kvx_status_t fail(const Error& error) noexcept {
  const size_t length = std::min(error.message.size(), sizeof last_error - 1);
  memcpy(last_error, error.message.data(), length);
  last_error[length] = '\0';
  return static_cast<kvx_status_t>(error.code);
}

}  // namespace kvx::boundary

extern "C" const char* kvx_last_error(void) {
  return kvx::boundary::last_error;
}

extern "C" const char* kvx_status_name(kvx_status_t status) {
  switch (kvx::boundary::number_of(status)) {
    case KVX_STATUS_OK:
      return "OK";
    case KVX_STATUS_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case KVX_STATUS_UNSUPPORTED:
      return "UNSUPPORTED";
    case KVX_STATUS_OUT_OF_RANGE:
      return "OUT_OF_RANGE";
    case KVX_STATUS_INCOMPATIBLE:
      return "INCOMPATIBLE";
    case KVX_STATUS_INTERNAL_ERROR:
      return "INTERNAL_ERROR";
    default:
      return "UNKNOWN";
  }
}
