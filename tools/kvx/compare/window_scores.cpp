// Strips of logits: the base's once, every other cache's beside it.
#include "tools/kvx/compare/window_scores.hpp"

#include <algorithm>

#include "quality/logits.hpp"

namespace kvx::tool {
namespace {

using quality::LogitSummary;
using quality::ScoredToken;

constexpr int kStripTokens = 64;

// Logits of a strip, and what the measures need of each row.
struct Strip {
  std::vector<float> logits;  // [kStripTokens, vocabulary]
  std::vector<LogitSummary> summaries;

  Strip(int vocabulary) : logits(static_cast<size_t>(kStripTokens) * vocabulary) {}

  std::span<const float> row(int token, int vocabulary) const {
    return {logits.data() + static_cast<size_t>(token) * vocabulary,
            static_cast<size_t>(vocabulary)};
  }
};

Status fill(runner::Model& model, const float* hidden, int num_tokens, Executor& executor,
            Strip& strip) {
  KVX_RETURN_IF_ERROR(model.logits(hidden, num_tokens, strip.logits.data()));
  strip.summaries.resize(num_tokens);
  executor.parallel_for(num_tokens, [&](int token) {
    strip.summaries[token] = quality::summarize(strip.row(token, model.config().vocab_size));
  });
  return {};
}

// scores: [tokens of the strip].
void compare(const Strip& base, const Strip& other, std::span<const int> targets, int vocabulary,
             Executor& executor, ScoredToken* scores) {
  executor.parallel_for(static_cast<int>(targets.size()), [&](int token) {
    const std::span<const float> p = base.row(token, vocabulary);
    const std::span<const float> q = other.row(token, vocabulary);
    const LogitSummary& p_summary = base.summaries[token];
    const LogitSummary& q_summary = other.summaries[token];
    scores[token] = {quality::negative_log_likelihood(p, p_summary, targets[token]),
                     quality::negative_log_likelihood(q, q_summary, targets[token]),
                     quality::kl_divergence(p, p_summary, q, q_summary),
                     p_summary.top == q_summary.top};
  });
}

}  // namespace

Result<std::vector<std::vector<ScoredToken>>> score_window(
    runner::Model& model, std::span<const std::vector<float>> hidden, std::span<const int> targets,
    Executor& executor) {
  const int vocabulary = model.config().vocab_size;
  const int64_t hidden_size = model.config().hidden;
  const int num_tokens = static_cast<int>(targets.size());
  std::vector<std::vector<ScoredToken>> scores(hidden.size(),
                                               std::vector<ScoredToken>(targets.size()));
  Strip base(vocabulary);
  Strip other(vocabulary);
  for (int first = 0; first < num_tokens; first += kStripTokens) {
    const int count = std::min(kStripTokens, num_tokens - first);
    const std::span<const int> strip_targets = targets.subspan(first, count);
    KVX_RETURN_IF_ERROR(
        fill(model, hidden.front().data() + first * hidden_size, count, executor, base));
    compare(base, base, strip_targets, vocabulary, executor, scores.front().data() + first);
    for (size_t c = 1; c < hidden.size(); ++c) {
      KVX_RETURN_IF_ERROR(
          fill(model, hidden[c].data() + first * hidden_size, count, executor, other));
      compare(base, other, strip_targets, vocabulary, executor, scores[c].data() + first);
    }
  }
  return scores;
}

}  // namespace kvx::tool
