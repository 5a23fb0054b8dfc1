// One window after the other through a cache; its states are scored against the base's.
#include "tools/kvx/tune/judge.hpp"

#include "tools/kvx/compare/window_scores.hpp"

namespace kvx::tool {

Result<std::unique_ptr<runner::KvAttention>> make_base_cache(const runner::Model& model,
                                                             const Engine& engine,
                                                             const CacheSetup& setup) {
  runner::KvAttentionOptions base;
  base.recipe = kv::parse_recipe("bf16").value();
  base.block_size = setup.block_size;
  base.max_tokens = setup.context;
  base.on_gpu = setup.on_gpu;
  return runner::KvAttention::create(model.config(), base, *engine.executor);
}

int64_t Judge::num_tokens() const {
  return static_cast<int64_t>(windows_.size() * windows_.front().size());
}

// The last token is not fed: what it predicts lies outside the window.
Result<std::vector<float>> Judge::states_of(const std::vector<int>& window,
                                            runner::KvAttention& attention) {
  const int context = static_cast<int>(window.size());
  const int first = first_scored(context);
  std::vector<float> states(static_cast<size_t>(num_scored(context)) * model_.config().hidden);
  KVX_RETURN_IF_ERROR(attention.reset());
  const std::span<const int> tokens(window);
  int64_t fed = 0;
  const auto on_step = [&](int64_t num_fed) {
    work_.advance(num_fed - fed);
    fed = num_fed;
    return Status();
  };
  KVX_RETURN_IF_ERROR(model_.forward(tokens.first(first), attention, nullptr, on_step));
  fed = 0;
  KVX_RETURN_IF_ERROR(model_.forward(tokens.subspan(first, num_scored(context)), attention,
                                     states.data(), on_step));
  return states;
}

Status Judge::run_base(const runner::KvAttentionOptions& beside) {
  const int context = static_cast<int>(windows_.front().size());
  KVX_ASSIGN_OR_RETURN(
      auto attention,
      make_base_cache(model_, engine_, {context, beside.block_size, beside.on_gpu}));
  for (const std::vector<int>& window : windows_) {
    KVX_ASSIGN_OR_RETURN(std::vector<float> states, states_of(window, *attention));
    base_.push_back(std::move(states));
  }
  return {};
}

Result<quality::CacheQuality> Judge::judge(const runner::KvAttentionOptions& cache) {
  if (base_.empty()) KVX_RETURN_IF_ERROR(run_base(cache));
  KVX_ASSIGN_OR_RETURN(auto attention,
                       runner::KvAttention::create(model_.config(), cache, *engine_.executor));
  quality::CacheQuality quality;
  for (size_t w = 0; w < windows_.size(); ++w) {
    KVX_ASSIGN_OR_RETURN(std::vector<float> states, states_of(windows_[w], *attention));
    const std::vector<float> both[] = {base_[w], std::move(states)};
    const int context = static_cast<int>(windows_[w].size());
    const std::span<const int> targets =
        std::span(windows_[w]).subspan(first_scored(context) + 1, num_scored(context));
    KVX_ASSIGN_OR_RETURN(const auto scores, score_window(model_, both, targets, *engine_.executor));
    quality.add_window(scores[1]);
  }
  return quality;
}

}  // namespace kvx::tool
