// ProxyAttention: how far caches are off in every layer and KV head, from one pass over a text:
// what attention adds to the residual stream through them, beside what it adds through the base.
#pragma once

#include <vector>

#include "runner/attention_backend.hpp"
#include "runner/model.hpp"

namespace kvx::tool {

// The error of a layer is the mean over tokens of |W (out' - out)|^2 / |x|^2: out and out' are
// attention's outputs by the base and by a cache, W the layer's output projection, x the layer's
// input. Of a part of the layer, some of its heads, it is the same with the other heads' outputs
// equal: what the heads add together is taken for independent. The sum over layers goes with the
// divergence of the whole model (their logarithms correlate by 0.99 over recipes of one model, the
// factor is near 1).
class ProxyAttention final : public runner::AttentionBackend {
 public:
  // num_parts: equal runs of a layer's KV heads, measured apart; 1 for the whole layer. Tokens
  // before first_measured are not measured. All backends are empty and outlive this one.
  ProxyAttention(runner::Model& model, runner::AttentionBackend& base,
                 std::vector<runner::AttentionBackend*> caches, int num_parts,
                 int64_t first_measured);

  int64_t num_tokens() const override { return base_.num_tokens(); }
  int64_t max_step_tokens() const override;
  Status begin_step(int num_tokens) override;
  void see_layer_input(int layer, int num_tokens, const float* x) override;
  Status append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                           const float* v, float* out) override;
  Status end_step() override;

  // [num_layers, num_parts].
  std::vector<double> errors(size_t cache) const;

 private:
  Status measure(size_t cache, int layer, int part, int num_tokens, const float* base_out);

  runner::Model& model_;
  runner::AttentionBackend& base_;
  std::vector<runner::AttentionBackend*> caches_;
  int num_parts_;
  int64_t first_measured_;
  int64_t num_measured_ = 0;               // tokens
  std::vector<std::vector<double>> sums_;  // [caches][num_layers * num_parts]
  std::vector<double> input_squares_;      // [num_tokens], |x|^2 of this layer
  std::vector<float> cache_out_;           // [num_tokens, attended_size]
  std::vector<float> difference_;          // [num_tokens, attended_size], 0 outside the part
  std::vector<float> added_;               // [num_tokens, hidden], the difference projected
};

}  // namespace kvx::tool
