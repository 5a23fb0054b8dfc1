// Scoring a window: what each cache's predictions are worth, from the hidden states that its
// forward pass left.
#pragma once

#include <span>
#include <vector>

#include "quality/cache_quality.hpp"
#include "runner/model.hpp"

namespace kvx::tool {

// Position `first` .. context - 2 of a window predict the token after them; `first` is the middle,
// as in llama.cpp's perplexity tool.
constexpr int first_scored(int context) {
  return context / 2;
}
constexpr int num_scored(int context) {
  return context - 1 - first_scored(context);
}

// hidden[c]: [num_scored, hidden] of cache c, the base cache first; targets: [num_scored], the
// tokens that came. Returns [caches][num_scored]. Logits are made in strips of 64 positions, so
// that memory does not grow with the window.
Result<std::vector<std::vector<quality::ScoredToken>>> score_window(
    runner::Model& model, std::span<const std::vector<float>> hidden, std::span<const int> targets,
    Executor& executor);

}  // namespace kvx::tool
