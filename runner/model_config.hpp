// ModelConfig: a Llama model's dimensions and constants, read from its GGUF and checked.
#pragma once

#include <vector>

#include "core/result.hpp"
#include "runner/gguf.hpp"

namespace kvx::runner {

struct ModelConfig {
  int num_layers = 0;
  int hidden = 0;
  int feed_forward = 0;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  int context_length = 0;
  int rope_dims = 0;  // the first of head_dim that rotate
  float norm_epsilon = 1e-5f;
  // Radians a position for each pair (2i, 2i + 1): base^(-2i / rope_dims), scaled as the file
  // specifies.
  std::vector<double> rope_frequencies;

  int q_size() const { return num_q_heads * head_dim; }
  int kv_size() const { return num_kv_heads * head_dim; }
};

// UNSUPPORTED: another architecture, or a rope scaling other than none, linear and llama3's
// factors. INVALID_ARGUMENT names the value that is missing or cannot be.
Result<ModelConfig> read_model_config(const GgufView& gguf);

}  // namespace kvx::runner
