// QueryRow: what a work tile of attention remembers of a query row.
#pragma once

#include "ops/attend/softmax_state.hpp"

namespace kvx::ops {

struct QueryRow {
  int first_token = 0;  // it sees tokens [first_token, end_token) of its sequence, less what a tree
  int end_token = 0;    // mask hides
  float bias = 0.0f;    // q . mean of K
  SoftmaxState softmax;
};

}  // namespace kvx::ops
