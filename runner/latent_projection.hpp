// LatentProjection: the weights of latent attention (MLA), absorbed, so that a cache holds one row
// a token.
//
//   k row   [latent, normed: latent_dim][rotary, after RoPE: rotary_dim]    V is its first part
//   q row   [a head's query without RoPE times its key weights: latent_dim][rotary: rotary_dim]
//   output  attention's [latent_dim] of a head times its value weights: value_dim
#pragma once

#include <memory>
#include <vector>

#include "core/executor.hpp"
#include "runner/model_config.hpp"
#include "runner/weight_loader.hpp"

namespace kvx::runner {

// The rotation of each token of a step, [num_tokens, rotary_dim / 2].
struct RopeAngles {
  const float* cosines = nullptr;
  const float* sines = nullptr;
};

class LatentProjection {
 public:
  // prefix: of the layer's tensors, "blk.0."; config outlives the projection. Errors as
  // WeightLoader's.
  static Result<std::unique_ptr<LatentProjection>> load(const WeightLoader& weights,
                                                        const ModelConfig& config,
                                                        const std::string& prefix);

  // x: [num_tokens, hidden], normed; q: [num_tokens, num_q_heads, head_dim]; k: [num_tokens,
  // head_dim].
  Status project(const float* x, int num_tokens, const RopeAngles& angles, float* q, float* k,
                 Executor& executor);
  // attended: [num_tokens, num_q_heads, latent_dim]; out: [num_tokens, num_q_heads, value_dim].
  Status expand(const float* attended, int num_tokens, float* out, Executor& executor);

 private:
  explicit LatentProjection(const ModelConfig& config) : config_(config) {}
  Status load_queries(const WeightLoader& weights, const std::string& prefix);
  Status load_rows(const WeightLoader& weights, const std::string& prefix);
  Status load_heads(const WeightLoader& weights, const std::string& prefix);
  Status project_queries(const float* x, int num_tokens, const RopeAngles& angles, float* q,
                         Executor& executor);

  const ModelConfig& config_;
  std::unique_ptr<Linear> query_down_;  // to query_rank; null: there is none
  std::vector<float> query_norm_;
  std::unique_ptr<Linear> query_;  // a part a head without RoPE, then a part a head with it
  std::unique_ptr<Linear> row_;    // latent, rotary
  std::vector<float> latent_norm_;
  std::vector<std::unique_ptr<Linear>> to_latent_;  // [heads]: a query without RoPE to latent_dim
  std::vector<std::unique_ptr<Linear>> to_value_;   // [heads]: latent_dim to value_dim

  std::vector<float> rank_, head_parts_, latent_, rotary_, values_;  // of one call
};

}  // namespace kvx::runner
