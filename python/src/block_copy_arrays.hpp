// BlockCopyArrays: a list of block copies in three arrays of the caller's library.
#pragma once

#include "python/src/arrays.hpp"

namespace kvx::python {

// Ids of blocks and how many of their tokens are copied, int64, int64 and int32 [copies]; all None:
// there is no list.
struct BlockCopyArrays {
  nb::handle from = nb::none();
  nb::handle to = nb::none();
  nb::handle tokens = nb::none();

  // object: None, or a tuple of the three.
  static BlockCopyArrays of(nb::handle object) {
    if (object.is_none()) return {};
    const auto three = nb::cast<nb::tuple>(object);
    return {three[0], three[1], three[2]};
  }
  bool is_given() const { return !from.is_none(); }
};

}  // namespace kvx::python
