// ShadowAttention: one backend that answers and others that are fed the same q, k and v beside it,
// so that their outputs differ only by the error of their caches.
#pragma once

#include <span>
#include <vector>

#include "quality/vector_error.hpp"
#include "runner/attention_backend.hpp"

namespace kvx::tool {

class ShadowAttention : public runner::AttentionBackend {
 public:
  // Outputs of tokens before first_measured are not compared: a window's first tokens lie wholly in
  // a full-precision cache's 16-bit blocks. All backends are empty and outlive this one.
  // query_size, row_size: of a token's queries and outputs. num_parts: of an output, KV head by KV
  // head, which are measured apart.
  ShadowAttention(runner::AttentionBackend& base, std::vector<runner::AttentionBackend*> shadows,
                  int num_layers, int query_size, int row_size, int num_parts,
                  int64_t first_measured);

  int64_t num_tokens() const override { return base_.num_tokens(); }
  // The smallest of all backends.
  int64_t max_step_tokens() const override;
  Status begin_step(int num_tokens) override;
  Status append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                           const float* v, float* out) override;
  Status end_step() override;

  // [num_layers, num_parts] of the shadow, against the base.
  std::span<const quality::VectorError> errors(size_t shadow) const { return errors_[shadow]; }
  // [query_size]: the queries of the last token, of the last step.
  std::span<const float> last_query(int layer) const { return last_queries_[layer]; }

 private:
  void measure(size_t shadow, int layer, const float* row, int t);

  runner::AttentionBackend& base_;
  std::vector<runner::AttentionBackend*> shadows_;
  std::vector<std::vector<quality::VectorError>> errors_;  // [shadows][num_layers, num_parts]
  std::vector<std::vector<float>> last_queries_;           // [num_layers][query_size]
  int query_size_;
  int row_size_;
  int num_parts_;
  int64_t first_measured_;
  std::vector<float> shadow_out_;  // [num_tokens, row_size]
};

}  // namespace kvx::tool
