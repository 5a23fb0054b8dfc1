// Every call goes to the base first; the shadows' outputs are compared and dropped.
#include "tools/kvx/compare/shadow_attention.hpp"

#include <algorithm>

namespace kvx::tool {

ShadowAttention::ShadowAttention(runner::AttentionBackend& base,
                                 std::vector<runner::AttentionBackend*> shadows, int num_layers,
                                 int query_size, int row_size, int num_parts,
                                 int64_t first_measured)
    : base_(base),
      shadows_(std::move(shadows)),
      errors_(shadows_.size(), std::vector<quality::VectorError>(num_layers * num_parts)),
      last_queries_(num_layers),
      query_size_(query_size),
      row_size_(row_size),
      num_parts_(num_parts),
      first_measured_(first_measured) {}

int64_t ShadowAttention::max_step_tokens() const {
  int64_t most = base_.max_step_tokens();
  for (const runner::AttentionBackend* shadow : shadows_) {
    most = std::min(most, shadow->max_step_tokens());
  }
  return most;
}

Status ShadowAttention::begin_step(int num_tokens) {
  KVX_RETURN_IF_ERROR(base_.begin_step(num_tokens));
  for (runner::AttentionBackend* shadow : shadows_) {
    KVX_RETURN_IF_ERROR(shadow->begin_step(num_tokens));
  }
  return {};
}

Status ShadowAttention::append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                                          const float* v, float* out) {
  KVX_RETURN_IF_ERROR(base_.append_and_attend(layer, num_tokens, q, k, v, out));
  const size_t size = static_cast<size_t>(num_tokens) * row_size_;
  shadow_out_.resize(std::max(shadow_out_.size(), size));
  const float* last_query = q + int64_t{num_tokens - 1} * query_size_;
  last_queries_[layer].assign(last_query, last_query + query_size_);
  const auto skipped =
      static_cast<int>(std::clamp<int64_t>(first_measured_ - base_.num_tokens(), 0, num_tokens));
  for (size_t s = 0; s < shadows_.size(); ++s) {
    KVX_RETURN_IF_ERROR(
        shadows_[s]->append_and_attend(layer, num_tokens, q, k, v, shadow_out_.data()));
    for (int t = skipped; t < num_tokens; ++t) measure(s, layer, out + int64_t{t} * row_size_, t);
  }
  return {};
}

// row: the base's of token t.
void ShadowAttention::measure(size_t shadow, int layer, const float* row, int t) {
  const size_t part_size = static_cast<size_t>(row_size_ / num_parts_);
  const float* other = shadow_out_.data() + int64_t{t} * row_size_;
  for (int part = 0; part < num_parts_; ++part) {
    const size_t first = part * part_size;
    errors_[shadow][layer * num_parts_ + part].add({row + first, part_size},
                                                   {other + first, part_size});
  }
}

Status ShadowAttention::end_step() {
  KVX_RETURN_IF_ERROR(base_.end_step());
  for (runner::AttentionBackend* shadow : shadows_) KVX_RETURN_IF_ERROR(shadow->end_step());
  return {};
}

}  // namespace kvx::tool
