// run_call: the frame around every exported function. An Error becomes a status and the thread's
// last error; an exception ends here.
#pragma once

#include "core/caught.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// Remembers the text for kvx_last_error() of this thread, and gives the error's status.
kvx_status_t fail(const Error& error) noexcept;

// Runs a function that returns a Status.
template <class Body>
kvx_status_t run_call(const Body& body) noexcept {
  const Status status = caught(body);
  return status.ok() ? KVX_STATUS_OK : fail(status.error());
}

}  // namespace kvx::boundary
