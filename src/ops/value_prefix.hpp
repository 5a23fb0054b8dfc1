// prefix_of: a V that is a part of K's rows, as in latent caches.
#pragma once

#include "ops/cache_view.hpp"

namespace kvx::ops {

// The first head_dim numbers of K's rows. Requires: head_dim is at most K's and fits its format.
inline SideView prefix_of(const SideView& k, int head_dim) {
  SideView v = k;
  v.head_dim = head_dim;
  v.is_alias = true;
  v.feedback = nullptr;
  v.counts = nullptr;
  return v;
}

}  // namespace kvx::ops
