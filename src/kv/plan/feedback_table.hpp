// feedback_table: the weights of error feedback from the second moments of queries.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/result.hpp"

namespace kvx::kv {

// What a KV head's queries are like, and what its keys go through before they are rounded.
struct FeedbackInput {
  int num_kv_heads = 0;
  int head_dim = 0;
  // [num_kv_heads, head_dim, head_dim]: the mean, or the sum, of q q^T over the queries that meet
  // the head's keys, as attention receives them (after RoPE, before any transform). Symmetric.
  std::span<const double> moments = {};
  std::span<const float> factor = {};  // [num_kv_heads, head_dim], as k_factor; empty: none
  bool hadamard = false;               // whether the recipe rotates K
  double damping = 0.01;               // of the moments' mean diagonal, added to the diagonal
  bool has_error_weights = false;      // whether the diagonal gets D's, of mean 1
};

// LayerCalibration::k_feedback, [num_kv_heads, head_dim, head_dim]. A head whose moments are all
// zero gets no feedback. INVALID_ARGUMENT names the field that has another size than expected, the
// number that is not finite, the factor that is not positive, or the head whose moments are no
// second moments (a diagonal below 0, or sides that differ).
//
// Rounding turns k into k - d. Its scores' squared error is d^T H d with H = E[q q^T] + damping. H
// = (I + U) D (I + U)^T with U above the diagonal: if e, the error of each number when it is
// rounded, is d (I + U), then d^T H d is the sum of D_i e_i^2, the least that rounding in this
// order can reach. So number j is rounded as k_j + sum over i < j of e_i W_ij, W = I - (I +
// U)^-1 (Chee et al. 2023, "QuIP", theorem 1; Frantar et al. 2022, "GPTQ"). Dual-scale formats
// read D, too: they refit a row's scale in the same measure.
Result<std::vector<float>> feedback_table(const FeedbackInput& input);

}  // namespace kvx::kv
