// DeferredErrors remembers the first thing that a call asks for and this build cannot do, while the
// checks of the descriptors go on: a malformed call is INVALID_ARGUMENT whatever else it asks for.
#pragma once

#include "core/result.hpp"

namespace kvx::boundary {

class DeferredErrors {
 public:
  void add(Error unsupported) {
    if (first_.ok()) first_ = std::move(unsupported);
  }
  const Status& status() const { return first_; }

 private:
  Status first_;
};

}  // namespace kvx::boundary
