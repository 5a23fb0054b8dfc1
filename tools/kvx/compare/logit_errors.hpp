// LogitErrors: how far attention's logits, q k before the softmax, are from those of the base cache
// when both caches store the same keys.
#pragma once

#include <span>
#include <vector>

#include "quality/vector_error.hpp"
#include "runner/kv_attention.hpp"

namespace kvx::tool {

// Sizes of the rows that logits are made of.
struct LogitShape {
  int num_layers = 0;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
};

class LogitErrors {
 public:
  LogitErrors(const LogitShape& shape, size_t num_others);

  // Adds the logits of one query in every layer against all keys, as the caches store them now;
  // that is what the query saw when its token is the last one. All hold the same tokens.
  // queries(layer): [num_q_heads, head_dim]; others: [num_others].
  template <class Queries>
  Status add(runner::KvAttention& base, std::span<runner::KvAttention* const> others,
             const Queries& queries, Executor& executor) {
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      KVX_RETURN_IF_ERROR(add_layer(layer, base, others, queries(layer), executor));
    }
    return {};
  }

  // [num_layers, num_kv_heads] of one of the others. The scale of the logits cancels.
  std::span<const quality::VectorError> errors(size_t other) const { return errors_[other]; }

 private:
  Status add_layer(int layer, runner::KvAttention& base,
                   std::span<runner::KvAttention* const> others, std::span<const float> query,
                   Executor& executor);
  void add_head(int layer, int kv_head, std::span<const float> query, size_t other);

  LogitShape shape_;
  std::vector<std::vector<quality::VectorError>> errors_;  // [others][num_layers, num_kv_heads]
  std::vector<float> base_keys_;                           // [tokens, num_kv_heads, head_dim]
  std::vector<float> other_keys_;                          // likewise
};

}  // namespace kvx::tool
