// Tokens are gathered expert by expert, so that each expert's weights are read once a step.
#include "runner/experts.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "runner/elementwise.hpp"

namespace kvx::runner {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

std::vector<float> scores_of(const ExpertSizes& sizes, std::span<const float> logits) {
  std::vector<float> scores(logits.begin(), logits.end());
  if (sizes.has_sigmoid_scores) {
    for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
    return scores;
  }
  const float top = *std::ranges::max_element(scores);
  float sum = 0;
  for (float& score : scores) sum += score = std::exp(score - top);
  for (float& score : scores) score /= sum;
  return scores;
}

// The indices of the `count` largest, the largest first.
std::vector<int> largest(std::span<const float> numbers, int count) {
  std::vector<int> order(numbers.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return numbers[a] > numbers[b]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

// Experts outside the best groups are never chosen. A group is as good as its best expert, or, with
// sigmoid scores, as its best two together.
void drop_groups(const ExpertSizes& sizes, std::vector<float>& choice) {
  const int group_size = sizes.num_experts / sizes.num_groups;
  const int num_best = sizes.has_sigmoid_scores ? std::min(2, group_size) : 1;
  std::vector<float> groups;
  for (int g = 0; g < sizes.num_groups; ++g) {
    const std::span<const float> group = std::span<const float>(choice).subspan(
        static_cast<size_t>(g) * group_size, static_cast<size_t>(group_size));
    float sum = 0;
    for (const int expert : largest(group, num_best)) sum += group[expert];
    groups.push_back(sum);
  }
  const std::vector<int> kept = largest(groups, sizes.num_used_groups);
  for (int g = 0; g < sizes.num_groups; ++g) {
    if (std::ranges::find(kept, g) != kept.end()) continue;
    std::fill_n(choice.begin() + g * group_size, group_size, kNever);
  }
}

}  // namespace

std::vector<ChosenExpert> choose_experts(const ExpertSizes& sizes, std::span<const float> logits,
                                         std::span<const float> bias) {
  const std::vector<float> scores = scores_of(sizes, logits);
  std::vector<float> choice = scores;
  for (size_t i = 0; i < bias.size(); ++i) choice[i] += bias[i];
  if (sizes.num_groups > 1) drop_groups(sizes, choice);
  std::vector<ChosenExpert> chosen;
  float sum = 0;
  for (const int expert : largest(choice, sizes.num_used)) {
    chosen.push_back({expert, scores[expert]});
    sum += scores[expert];
  }
  const float factor = sizes.has_normed_weights ? sizes.scale / (sum + 1e-20f) : sizes.scale;
  for (ChosenExpert& one : chosen) one.weight *= factor;
  return chosen;
}

Result<std::unique_ptr<Experts>> Experts::load(const WeightLoader& weights,
                                               const ModelConfig& config,
                                               const std::string& prefix) {
  const ExpertSizes& sizes = config.experts;
  const int64_t hidden = config.hidden;
  const int64_t width = sizes.feed_forward;
  const int64_t count = sizes.num_experts;
  std::unique_ptr<Experts> experts(new Experts(config));
  KVX_ASSIGN_OR_RETURN(
      experts->router_,
      weights.load_linear(config.hidden, {{{prefix + "ffn_gate_inp.weight", sizes.num_experts}}}));
  if (weights.contains(prefix + "exp_probs_b.bias")) {
    KVX_ASSIGN_OR_RETURN(experts->choice_bias_,
                         weights.load_vector(prefix + "exp_probs_b.bias", sizes.num_experts));
  }
  KVX_ASSIGN_OR_RETURN(const GgufTensor* gate, weights.find(prefix + "ffn_gate_exps.weight",
                                                            std::array{hidden, width, count}));
  KVX_ASSIGN_OR_RETURN(const GgufTensor* up, weights.find(prefix + "ffn_up_exps.weight",
                                                          std::array{hidden, width, count}));
  KVX_ASSIGN_OR_RETURN(const GgufTensor* down, weights.find(prefix + "ffn_down_exps.weight",
                                                            std::array{width, hidden, count}));
  for (int64_t e = 0; e < count; ++e) {
    std::vector<LinearPart> gate_up;
    gate_up.push_back(rows_of(*gate, e * width, sizes.feed_forward));
    gate_up.push_back(rows_of(*up, e * width, sizes.feed_forward));
    std::vector<LinearPart> downs;
    downs.push_back(rows_of(*down, e * hidden, config.hidden));
    Expert expert;
    expert.feed_forward = sizes.feed_forward;
    KVX_ASSIGN_OR_RETURN(expert.gate_up, weights.create_linear(config.hidden, std::move(gate_up)));
    KVX_ASSIGN_OR_RETURN(expert.down, weights.create_linear(sizes.feed_forward, std::move(downs)));
    experts->experts_.push_back(std::move(expert));
  }
  if (sizes.num_shared == 0) return experts;
  Expert& shared = experts->shared_;
  shared.feed_forward = sizes.num_shared * sizes.feed_forward;
  KVX_ASSIGN_OR_RETURN(
      shared.gate_up,
      weights.load_linear(config.hidden,
                          {{{prefix + "ffn_gate_shexp.weight", shared.feed_forward},
                            {prefix + "ffn_up_shexp.weight", shared.feed_forward}}}));
  KVX_ASSIGN_OR_RETURN(shared.down,
                       weights.load_linear(shared.feed_forward,
                                           {{{prefix + "ffn_down_shexp.weight", config.hidden}}}));
  return experts;
}

Status Experts::feed(const float* x, int num_tokens, float* out, Executor& executor) {
  const int hidden = config_.hidden;
  const int num_experts = config_.experts.num_experts;
  logits_.resize(static_cast<size_t>(num_tokens) * num_experts);
  KVX_RETURN_IF_ERROR(router_->multiply(x, num_tokens, std::array{logits_.data()}, executor));
  struct Visit {
    int token;
    float weight;
  };
  std::vector<std::vector<Visit>> visits(static_cast<size_t>(num_experts));
  for (int t = 0; t < num_tokens; ++t) {
    const std::span<const float> logits(logits_.data() + static_cast<size_t>(t) * num_experts,
                                        static_cast<size_t>(num_experts));
    for (const ChosenExpert& one : choose_experts(config_.experts, logits, choice_bias_)) {
      visits[one.expert].push_back({t, one.weight});
    }
  }
  if (shared_.gate_up) {
    KVX_RETURN_IF_ERROR(feed_expert(shared_, x, num_tokens, out, executor));
  } else {
    std::fill_n(out, static_cast<size_t>(num_tokens) * hidden, 0.0f);
  }
  for (int e = 0; e < num_experts; ++e) {
    const auto count = static_cast<int>(visits[e].size());
    if (count == 0) continue;
    inputs_.resize(std::max(inputs_.size(), static_cast<size_t>(count) * hidden));
    outputs_.resize(std::max(outputs_.size(), static_cast<size_t>(count) * hidden));
    for (int i = 0; i < count; ++i) {
      std::copy_n(x + int64_t{visits[e][i].token} * hidden, hidden,
                  inputs_.data() + int64_t{i} * hidden);
    }
    KVX_RETURN_IF_ERROR(feed_expert(experts_[e], inputs_.data(), count, outputs_.data(), executor));
    for (int i = 0; i < count; ++i) {
      float* to = out + int64_t{visits[e][i].token} * hidden;
      const float* from = outputs_.data() + int64_t{i} * hidden;
      for (int d = 0; d < hidden; ++d) to[d] += visits[e][i].weight * from[d];
    }
  }
  return {};
}

Status Experts::feed_expert(Expert& expert, const float* x, int num_tokens, float* y,
                            Executor& executor) {
  const size_t size = static_cast<size_t>(num_tokens) * expert.feed_forward;
  gate_.resize(std::max(gate_.size(), size));
  up_.resize(std::max(up_.size(), size));
  KVX_RETURN_IF_ERROR(
      expert.gate_up->multiply(x, num_tokens, std::array{gate_.data(), up_.data()}, executor));
  silu_multiply(gate_.data(), up_.data(), num_tokens, expert.feed_forward, executor);
  return expert.down->multiply(gate_.data(), num_tokens, std::array{y}, executor);
}

}  // namespace kvx::runner
