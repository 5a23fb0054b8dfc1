// What a contiguous cache is made of, and how many bytes that takes.
#pragma once

#include <optional>
#include <vector>

#include "kv/plan/layer_tables.hpp"
#include "kv/verbs/cuda_place.hpp"

namespace kvx::kv {

inline constexpr int kMaxContiguousTokens = 1 << 20;  // of one sequence, held at once

// What happens when a sequence would pass max_seq_len.
enum class Overflow : uint8_t {
  kError,  // OUT_OF_RANGE, nothing written
  kEvict,  // the oldest tokens leave and the others move to the front
};

struct ContiguousConfig {
  // A layer with a window is a ring: each query sees its own and the window - 1 tokens before, and
  // older tokens are overwritten.
  CacheGeometry geometry;
  Recipe recipe;  // without full-precision window and page-shared scales: both need blocks
  std::vector<RecipeOverride> overrides;
  std::vector<LayerCalibration> calibration;  // [num_layers], or empty; without block offsets

  int batch_size = 0;
  int num_q_heads = 0;  // a multiple of num_kv_heads
  int max_seq_len = 0;
  Overflow overflow = Overflow::kError;
  // Queries of one attend that a full ring must serve. Together they see window + max_append - 1
  // tokens, so that many are kept; 1 keeps just the window.
  int max_append = 1;

  // The arrays lie in a GPU's memory, and so do the rows of every call. One append takes at most
  // max_step_tokens tokens, those of all sequences together.
  std::optional<CudaPlacement> cuda;

  // Tokens of a sequence that a layer keeps. Requires: plan_contiguous(*this).ok().
  int kept_tokens(int layer) const;
  // Tokens of a sequence that a layer has memory for. The token at position p has slot p %
  // capacity. A ring's passes follow each other without gaps, so on a GPU, whose fast kernels read
  // blocks of whole tiles, a ring has memory for more than it keeps.
  int capacity(int layer) const;
  // Tokens of a sequence's arrays in a layer: capacity, or whole tiles on a GPU.
  int block_tokens(int layer) const;
};

// One plan a layer. INVALID_ARGUMENT names the field that does not fit; OUT_OF_RANGE: more than
// kMaxContiguousTokens tokens, or 2^63 bytes.
Result<std::vector<LayerPlan>> plan_contiguous(const ContiguousConfig& config);

// Bytes of one token of every sequence of the batch in a layer, K and V: codes and computed scales.
// Given scales are per head, not per token, and are not counted.
// Requires: plan is one of plan_contiguous(config).
int64_t bytes_per_position(const ContiguousConfig& config, const LayerPlan& plan);

// Bytes that a cache of this configuration allocates for K and V, without allocating them. Errors
// as plan_contiguous.
Result<int64_t> contiguous_bytes(const ContiguousConfig& config);

}  // namespace kvx::kv
