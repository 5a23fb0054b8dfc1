// ReferenceAttention: every K and V in f32, sums in double: what any cache is compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "runner/attention_backend.hpp"
#include "runner/model_config.hpp"

namespace kvx::tests {

class ReferenceAttention final : public runner::AttentionBackend {
 public:
  explicit ReferenceAttention(const runner::ModelConfig& config, int64_t max_step_tokens = 512)
      : config_(config), max_step_tokens_(max_step_tokens), k_(config.num_layers), v_(k_) {}

  int64_t num_tokens() const override { return num_tokens_; }
  int64_t max_step_tokens() const override { return max_step_tokens_; }
  Status begin_step(int num_tokens) override {
    step_tokens_ = num_tokens;
    return {};
  }
  Status end_step() override {
    num_tokens_ += step_tokens_;
    return {};
  }

  Status append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                           const float* v, float* out) override {
    const int64_t numbers = int64_t{num_tokens} * config_.kv_size();
    k_[layer].insert(k_[layer].end(), k, k + numbers);
    v_[layer].insert(v_[layer].end(), v, v + numbers);
    for (int token = 0; token < num_tokens; ++token) {
      for (int head = 0; head < config_.num_q_heads; ++head) {
        const int64_t row = (int64_t{token} * config_.num_q_heads + head) * config_.head_dim;
        attend(layer, num_tokens_ + token + 1, head, q + row, out + row);
      }
    }
    return {};
  }

 private:
  void attend(int layer, int64_t visible, int head, const float* q, float* out) {
    const int kv_head = head * config_.num_kv_heads / config_.num_q_heads;
    const auto row = [&](const std::vector<float>& rows, int64_t token) {
      return rows.data() + token * config_.kv_size() + kv_head * config_.head_dim;
    };
    std::vector<double> scores(visible);
    for (int64_t t = 0; t < visible; ++t) {
      double dot = 0;
      for (int d = 0; d < config_.head_dim; ++d) dot += double{q[d]} * row(k_[layer], t)[d];
      scores[t] = dot / std::sqrt(double(config_.head_dim));
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (double& score : scores) total += score = std::exp(score - top);
    std::vector<double> sum(config_.head_dim, 0.0);
    for (int64_t t = 0; t < visible; ++t) {
      for (int d = 0; d < config_.head_dim; ++d) sum[d] += scores[t] * row(v_[layer], t)[d];
    }
    for (int d = 0; d < config_.head_dim; ++d) out[d] = static_cast<float>(sum[d] / total);
  }

  runner::ModelConfig config_;
  int64_t max_step_tokens_;
  int64_t num_tokens_ = 0;
  int step_tokens_ = 0;
  std::vector<std::vector<float>> k_, v_;  // [layers][tokens, num_kv_heads, head_dim]
};

}  // namespace kvx::tests
