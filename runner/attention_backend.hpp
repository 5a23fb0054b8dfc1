// AttentionBackend: where a model's K and V go and where its attention comes from, one sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "core/result.hpp"
#include "core/rows.hpp"
#include "device/cuda.hpp"

namespace kvx::runner {

// Model::forward opens a step, calls append_and_attend once a layer, in order, and closes the step.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  // Tokens of all closed steps: the next token's position.
  virtual int64_t num_tokens() const = 0;
  // The most tokens that the next step may have; 0 when the sequence is full.
  virtual int64_t max_step_tokens() const = 0;

  virtual Status begin_step(int num_tokens) = 0;
  // What the layer adds its attention to: x [num_tokens, hidden]. Called before append_and_attend;
  // a backend that measures wants to know.
  virtual void see_layer_input(int, int, const float*) {}
  // k, v: [num_tokens, num_kv_heads, head_dim], q: [num_tokens, num_q_heads, head_dim], out:
  // [num_tokens, num_q_heads, value_dim], all after RoPE. Each token sees itself and every token
  // before it. v is null in a latent model, whose values are the first value_dim numbers of k.
  virtual Status append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                                   const float* v, float* out) = 0;
  // The stream of a backend that also takes rows on the first GPU, in that stream's order.
  virtual std::optional<device::CudaStream> gpu_stream() const { return std::nullopt; }
  // The same of such rows, of any strides. On its way when it returns. Not for latent models.
  virtual Status append_and_attend_on_gpu(int, int, FloatRows, FloatRows, FloatRows,
                                          MutableFloatRows) {
    return unsupported("the backend takes no rows on a GPU; gpu_stream() says which does");
  }
  virtual Status end_step() = 0;
  // The tokens of the step that was just closed. A backend that shares prefixes wants to know.
  virtual Status record_tokens(std::span<const int>) { return {}; }
};

}  // namespace kvx::runner
