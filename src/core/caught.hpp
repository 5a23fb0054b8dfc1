// caught(): an exception as an Error, where bookkeeping must be completed. Nothing in the core
// throws, but memory ends, and a caller's executor may do anything.
#pragma once

#include <exception>
#include <new>

#include "core/result.hpp"

namespace kvx {

// body returns a Status or a Result.
template <class Body>
auto caught(const Body& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Error{ErrorCode::kInternal, "out of memory"};
  } catch (const std::exception& error) {
    return internal_error("{}", error.what());
  } catch (...) {
    return Error{ErrorCode::kInternal, "an exception of an unknown type"};
  }
}

}  // namespace kvx
