// run_call() wraps the body of every exported function. It turns an Error into a status and the
// thread's last error, and lets no exception out.
#pragma once

#include "core/caught.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// Keeps the error's text for kvx_last_error() of this thread and returns its status.
kvx_status_t fail(const Error& error) noexcept;

// Runs a function that returns a Status.
template <class Body>
kvx_status_t run_call(const Body& body) noexcept {
  const Status status = caught(body);
  return status.ok() ? KVX_STATUS_OK : fail(status.error());
}

}  // namespace kvx::boundary
