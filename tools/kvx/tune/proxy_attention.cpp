// Every call goes to the base first. Projections are linear: one of the difference is enough.
#include "tools/kvx/tune/proxy_attention.hpp"

#include <algorithm>

namespace kvx::tool {

ProxyAttention::ProxyAttention(runner::Model& model, runner::AttentionBackend& base,
                               std::vector<runner::AttentionBackend*> caches, int num_parts,
                               int64_t first_measured)
    : model_(model),
      base_(base),
      caches_(std::move(caches)),
      num_parts_(num_parts),
      first_measured_(first_measured),
      sums_(caches_.size(),
            std::vector<double>(static_cast<size_t>(model.config().num_layers) * num_parts)) {}

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
  cache_out_.resize(static_cast<size_t>(num_tokens) * model_.config().attended_size());
  added_.resize(static_cast<size_t>(num_tokens) * model_.config().hidden);
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
  for (size_t i = 0; i < caches_.size(); ++i) {
    KVX_RETURN_IF_ERROR(
        caches_[i]->append_and_attend(layer, num_tokens, q, k, v, cache_out_.data()));
    if (base_.num_tokens() + num_tokens <= first_measured_) continue;
    for (int part = 0; part < num_parts_; ++part) {
      KVX_RETURN_IF_ERROR(measure(i, layer, part, num_tokens, out));
    }
  }
  return {};
}

Status ProxyAttention::measure(size_t cache, int layer, int part, int num_tokens,
                               const float* base_out) {
  const int row_size = model_.config().attended_size();
  const int part_size = row_size / num_parts_;
  difference_.assign(static_cast<size_t>(num_tokens) * row_size, 0.0f);
  for (int t = 0; t < num_tokens; ++t) {
    const int64_t first = int64_t{t} * row_size + part * part_size;
    for (int64_t i = first; i < first + part_size; ++i) {
      difference_[i] = cache_out_[i] - base_out[i];
    }
  }
  KVX_RETURN_IF_ERROR(
      model_.project_attention(layer, difference_.data(), num_tokens, added_.data()));
  const int hidden = model_.config().hidden;
  double& sum = sums_[cache][layer * num_parts_ + part];
  const int64_t skipped = std::max<int64_t>(0, first_measured_ - base_.num_tokens());
  for (int64_t t = skipped; t < num_tokens; ++t) {
    double squares = 0;
    for (int64_t i = t * hidden; i < (t + 1) * hidden; ++i)
      squares += double{added_[i]} * added_[i];
    if (input_squares_[t] > 0) sum += squares / input_squares_[t];
  }
  return {};
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
