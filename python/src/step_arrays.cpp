// Checks of a layer's rows against the cache's geometry and against each other.
#include "python/src/step_arrays.hpp"

#include <cmath>

#include "python/src/errors.hpp"

namespace kvx::python {

InputRows value_rows(nb::handle v, int64_t tokens, const kv::CacheGeometry& geometry,
                     const ArrayPlace& place) {
  if (!geometry.is_latent) {
    return input_rows(v, "v", {tokens, geometry.num_kv_heads, geometry.v_head_dim}, place);
  }
  if (v.is_none()) return {};
  throw CoreError(
      invalid_argument("v is given; a latent cache's values are a part of its keys: pass None"));
}

StepArrays step_arrays(const AttentionArguments& given, const kv::CacheGeometry& geometry,
                       const CudaLane* lane, const ArrayPlace& place) {
  StepArrays arrays;
  arrays.q = input_rows(given.q, "q", {-1, -1, geometry.k_head_dim}, place);
  const int64_t tokens = arrays.q.num_tokens;
  arrays.k = input_rows(given.k, "k", {tokens, geometry.num_kv_heads, geometry.k_head_dim}, place);
  arrays.v = value_rows(given.v, tokens, geometry, place);
  arrays.out =
      output_rows(given.out, "out", {tokens, arrays.q.num_heads, geometry.v_head_dim}, place);
  check_apart(arrays.out.array, arrays.q.array, "q");
  check_apart(arrays.out.array, arrays.k.array, "k");
  check_apart(arrays.out.array, arrays.v.array, "v");
  if (!given.sinks.is_none()) {
    arrays.sinks = input_floats(given.sinks, "sinks", arrays.q.num_heads, place);
  }
  check_apart(arrays.out.array, arrays.sinks, "sinks");
  if (!given.tree_mask.is_none()) {
    arrays.tree_mask = input_bytes(given.tree_mask, "tree_mask", tokens, -1, place);
  }
  check_apart(arrays.out.array, arrays.tree_mask, "tree_mask");
  if (lane != nullptr) {
    lane->keep(arrays.kept, place, given.q, arrays.q.array);
    lane->keep(arrays.kept, place, given.k, arrays.k.array);
    lane->keep(arrays.kept, place, given.v, arrays.v.array);
    lane->keep(arrays.kept, place, given.out, nb::ndarray<nb::ro>(arrays.out.array));
    lane->keep(arrays.kept, place, given.sinks, arrays.sinks);
    lane->keep(arrays.kept, place, given.tree_mask, arrays.tree_mask);
  }
  kv::AttentionParams& params = arrays.params;
  params.num_q_heads = arrays.q.num_heads;
  params.softmax_scale =
      given.softmax_scale.value_or(1.0f / std::sqrt(static_cast<float>(geometry.k_head_dim)));
  params.softcap = given.softcap;
  if (given.is_fast) params.precision = ops::Precision::kFast;
  if (arrays.sinks.is_valid()) params.sinks = static_cast<const float*>(arrays.sinks.data());
  if (arrays.tree_mask.is_valid()) {
    params.tree_mask = static_cast<const uint8_t*>(arrays.tree_mask.data());
    params.tree_mask_stride = static_cast<int64_t>(arrays.tree_mask.shape(1));
  }
  return arrays;
}

}  // namespace kvx::python
