// DeferredErrors keeps the first UNSUPPORTED error of a call while the checks of its descriptors go
// on: a malformed call is INVALID_ARGUMENT, whatever else is unsupported in it.
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
