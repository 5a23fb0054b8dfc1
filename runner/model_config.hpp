// ModelConfig: the dimensions and constants of a Llama, or of a DeepSeek-V2 and its kin
// ("deepseek2"), read from its GGUF and checked.
#pragma once

#include <vector>

#include "core/result.hpp"
#include "runner/gguf.hpp"

namespace kvx::runner {

// Latent attention (MLA). A token has one row for all heads, latent_dim numbers that are the value
// too, then rotary_dim.
struct LatentSizes {
  int query_rank = 0;  // of the queries' low-rank projection; 0: they have none
  int latent_dim = 0;  // 0: attention by heads of their own keys and values
  int rotary_dim = 0;
  int nope_dim = 0;   // of a head's query and key without RoPE
  int value_dim = 0;  // of a head's output
};

// Feed-forward layers of experts, from layer first_layer on.
struct ExpertSizes {
  int num_experts = 0;  // 0: none
  int num_used = 0;     // of a token
  int num_shared = 0;   // that every token uses beside them
  int num_groups = 1;   // of experts; a token's lie in num_used_groups of them
  int num_used_groups = 1;
  int feed_forward = 0;  // of an expert
  int first_layer = 0;
  bool has_sigmoid_scores = false;  // otherwise a softmax over all experts
  bool has_normed_weights = false;  // a token's weights add up to `scale`
  float scale = 1.0f;
};

struct ModelConfig {
  int num_layers = 0;
  int hidden = 0;
  int feed_forward = 0;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;   // of K's rows and attention's queries
  int value_dim = 0;  // of attention's output; V's rows, in a latent model the first part of K's
  int vocab_size = 0;
  int context_length = 0;
  int rope_dims = 0;  // the first of head_dim that rotate
  float norm_epsilon = 1e-5f;
  float softmax_scale = 0;
  LatentSizes latent;
  ExpertSizes experts;
  // Radians a position for each pair (2i, 2i + 1): base^(-2i / rope_dims), scaled as the file
  // specifies.
  std::vector<double> rope_frequencies;

  bool is_latent() const { return latent.latent_dim > 0; }
  bool has_experts(int layer) const {
    return experts.num_experts > 0 && layer >= experts.first_layer;
  }
  int q_size() const { return num_q_heads * head_dim; }
  int kv_size() const { return num_kv_heads * head_dim; }
  int attended_size() const { return num_q_heads * value_dim; }
};

// UNSUPPORTED: another architecture, or a rope scaling other than none, linear, llama3's factors
// and, of deepseek2, yarn. INVALID_ARGUMENT names the value that is missing or cannot be.
Result<ModelConfig> read_model_config(const GgufView& gguf);

}  // namespace kvx::runner
