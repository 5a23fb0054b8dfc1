// StepArrays: what append_and_attend is given in Python, checked and seen as the core's rows.
#pragma once

#include <optional>

#include "kv/kv_cache.hpp"
#include "python/src/arrays.hpp"
#include "python/src/cuda_lane.hpp"

namespace kvx::python {

// As Python's append_and_attend passes them; out is there, sinks may be none.
struct AttentionArguments {
  nb::handle q, k, v, out, sinks;
  std::optional<float> softmax_scale;
  float softcap = 0.0f;
  bool is_fast = false;
  nb::handle tree_mask = nb::none();  // uint8 [tokens, n], or none
};

// The arrays live as long as this does.
struct StepArrays {
  InputRows q, k, v;
  OutputRows out;
  nb::ndarray<nb::ro> sinks;
  nb::ndarray<nb::ro> tree_mask;
  kv::AttentionParams params;
  KeptArrays kept;  // on a GPU
};

// An argument `v`; no rows in a latent geometry, whose V is a part of K's rows. tokens: -1 for any.
// Throws CoreError.
InputRows value_rows(nb::handle v, int64_t tokens, const kv::CacheGeometry& geometry,
                     const ArrayPlace& place);

// lane: null on the CPU. Throws CoreError naming the array that does not fit.
StepArrays step_arrays(const AttentionArguments& given, const kv::CacheGeometry& geometry,
                       const CudaLane* lane, const ArrayPlace& place);

}  // namespace kvx::python
