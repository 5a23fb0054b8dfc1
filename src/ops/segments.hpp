// The segments of a layer's rows, for verbs that handle each as a layer of its own.
#pragma once

#include "core/result.hpp"
#include "core/rows.hpp"
#include "ops/cache_view.hpp"
#include "ops/transform.hpp"

namespace kvx::ops {

// The call of append or gather for the segment behind the first one of args.cache. Requires: there
// is one.
template <class Args>
Args next_segment_of(const Args& args) {
  Args next = args;
  next.cache = *args.cache.next_segment;
  next.transform = {};
  next.k = numbers_from(args.k, args.cache.runs.front().k.head_dim);
  next.v = {};
  return next;
}

// INVALID_ARGUMENT: the rows of two layers, named in the message, are cut into other segments.
inline Status check_same_segments(const char* a_name, const LayerView& a, const char* b_name,
                                  const LayerView& b) {
  const LayerView* x = &a;
  const LayerView* y = &b;
  for (int segment = 0; x != nullptr || y != nullptr; ++segment) {
    const int x_dim = x == nullptr || x->runs.empty() ? 0 : x->runs.front().k.head_dim;
    const int y_dim = y == nullptr || y->runs.empty() ? 0 : y->runs.front().k.head_dim;
    if (x_dim != y_dim) {
      return invalid_argument(
          "segment {} of K's rows has {} numbers in {} and {} in {}; expected the same", segment,
          x_dim, a_name, y_dim, b_name);
    }
    x = x == nullptr ? x : x->next_segment;
    y = y == nullptr ? y : y->next_segment;
  }
  return {};
}

}  // namespace kvx::ops
