// run_call: the frame around every exported function. An Error becomes a status and the thread's
// last error; an exception ends here.
#pragma once

#include <exception>
#include <new>

#include "core/result.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::abi {

// Remembers the text for kvx_last_error() of this thread, and gives the error's status.
kvx_status_t fail(const Error& error) noexcept;

// Runs a function that returns a Status.
template <class Body>
kvx_status_t run_call(Body body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? KVX_STATUS_OK : fail(status.error());
  } catch (const std::bad_alloc&) {
    return fail({ErrorCode::kInternal, "out of memory"});
  } catch (const std::exception& error) {
    return fail({ErrorCode::kInternal, error.what()});
  } catch (...) {
    return fail({ErrorCode::kInternal, "an exception of an unknown type"});
  }
}

}  // namespace kvx::abi
