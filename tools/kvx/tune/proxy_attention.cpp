// Every call goes to the base first; the others' outputs are projected, compared and dropped.
#include "tools/kvx/tune/proxy_attention.hpp"

#include <algorithm>

namespace kvx::tool {

ProxyAttention::ProxyAttention(runner::Model& model, runner::AttentionBackend& base,
                               std::vector<runner::AttentionBackend*> caches,
                               int64_t first_measured)
    : model_(model),
      base_(base),
      caches_(std::move(caches)),
      first_measured_(first_measured),
      sums_(caches_.size(), std::vector<double>(model.config().num_layers)) {}

int64_t ProxyAttention::max_step_tokens() const {
  int64_t most = base_.max_step_tokens();
  for (const runner::AttentionBackend* cache : caches_) {
    most = std::min(most, cache->max_step_tokens());
  }
  return most;
}

Status ProxyAttention::begin_step(int num_tokens) {
  KVX_RETURN_IF_ERROR(base_.begin_step(num_tokens));
  for (runner::AttentionBackend* cache : caches_) {
    KVX_RETURN_IF_ERROR(cache->begin_step(num_tokens));
  }
  const size_t added = static_cast<size_t>(num_tokens) * model_.config().hidden;
  cache_out_.resize(static_cast<size_t>(num_tokens) * model_.config().attended_size());
  base_added_.resize(added);
  cache_added_.resize(added);
  input_squares_.resize(num_tokens);
  const int64_t skipped = std::clamp<int64_t>(first_measured_ - base_.num_tokens(), 0, num_tokens);
  num_measured_ += num_tokens - skipped;
  return {};
}

void ProxyAttention::see_layer_input(int, int num_tokens, const float* x) {
  const int hidden = model_.config().hidden;
  for (int t = 0; t < num_tokens; ++t) {
    double squares = 0;
    for (int i = 0; i < hidden; ++i) squares += double{x[t * hidden + i]} * x[t * hidden + i];
    input_squares_[t] = squares;
  }
}

Status ProxyAttention::append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                                         const float* v, float* out) {
  KVX_RETURN_IF_ERROR(base_.append_and_attend(layer, num_tokens, q, k, v, out));
  const auto skipped =
      static_cast<int>(std::clamp<int64_t>(first_measured_ - base_.num_tokens(), 0, num_tokens));
  KVX_RETURN_IF_ERROR(model_.project_attention(layer, out, num_tokens, base_added_.data()));
  for (size_t c = 0; c < caches_.size(); ++c) {
    KVX_RETURN_IF_ERROR(
        caches_[c]->append_and_attend(layer, num_tokens, q, k, v, cache_out_.data()));
    if (skipped == num_tokens) continue;
    KVX_RETURN_IF_ERROR(
        model_.project_attention(layer, cache_out_.data(), num_tokens, cache_added_.data()));
    measure(c, layer, skipped, num_tokens);
  }
  return {};
}

void ProxyAttention::measure(size_t cache, int layer, int skipped, int num_tokens) {
  const int hidden = model_.config().hidden;
  for (int t = skipped; t < num_tokens; ++t) {
    double squares = 0;
    for (int i = t * hidden; i < (t + 1) * hidden; ++i) {
      const double difference = double{cache_added_[i]} - base_added_[i];
      squares += difference * difference;
    }
    if (input_squares_[t] > 0) sums_[cache][layer] += squares / input_squares_[t];
  }
}

Status ProxyAttention::end_step() {
  KVX_RETURN_IF_ERROR(base_.end_step());
  for (runner::AttentionBackend* cache : caches_) KVX_RETURN_IF_ERROR(cache->end_step());
  return {};
}

std::vector<double> ProxyAttention::errors(size_t cache) const {
  std::vector<double> errors = sums_[cache];
  for (double& error : errors) error /= static_cast<double>(std::max<int64_t>(1, num_measured_));
  return errors;
}

}  // namespace kvx::tool
