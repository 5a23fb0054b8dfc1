// Keys are read back and multiplied with the query: attention itself never shows its logits.
#include "tools/kvx/compare/logit_errors.hpp"

namespace kvx::tool {

LogitErrors::LogitErrors(const LogitShape& shape, size_t num_others)
    : shape_(shape),
      errors_(num_others,
              std::vector<quality::VectorError>(shape.num_layers * shape.num_kv_heads)) {}

void LogitErrors::add_head(int layer, int kv_head, std::span<const float> query, size_t other) {
  const size_t row_size = static_cast<size_t>(shape_.num_kv_heads) * shape_.head_dim;
  const size_t num_tokens = base_keys_.size() / row_size;
  const int q_per_kv = shape_.num_q_heads / shape_.num_kv_heads;
  std::vector<float> logits[2];
  for (int i = 0; i < q_per_kv; ++i) {
    const float* q = query.data() + (kv_head * q_per_kv + i) * shape_.head_dim;
    for (int c = 0; c < 2; ++c) {
      const float* k = (c == 0 ? base_keys_ : other_keys_).data() + kv_head * shape_.head_dim;
      logits[c].resize(num_tokens);
      for (size_t t = 0; t < num_tokens; ++t, k += row_size) {
        double sum = 0;
        for (int d = 0; d < shape_.head_dim; ++d) sum += static_cast<double>(q[d]) * k[d];
        logits[c][t] = static_cast<float>(sum);
      }
    }
    errors_[other][layer * shape_.num_kv_heads + kv_head].add(logits[0], logits[1]);
  }
}

Status LogitErrors::add_layer(int layer, runner::KvAttention& base,
                              std::span<runner::KvAttention* const> others,
                              std::span<const float> query, Executor& executor) {
  KVX_RETURN_IF_ERROR(base.read_keys(layer, base_keys_));
  for (size_t other = 0; other < others.size(); ++other) {
    KVX_RETURN_IF_ERROR(others[other]->read_keys(layer, other_keys_));
    executor.parallel_for(shape_.num_kv_heads,
                          [&](int head) { add_head(layer, head, query, other); });
  }
  return {};
}

}  // namespace kvx::tool
