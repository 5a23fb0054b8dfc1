// The windows' loop: forward passes per cache, then scores for all caches together.
#include "tools/kvx/compare/comparison.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "tools/kvx/compare/shadow_attention.hpp"
#include "tools/kvx/compare/window_scores.hpp"

namespace kvx::tool {
namespace {

using Clock = std::chrono::steady_clock;
using quality::ScoredToken;

constexpr int kMostDecodedTokens = 32;
constexpr int kPieceTokens = 256;  // between two looks at the progress line

// One cache and what is known of it so far.
struct Subject {
  std::string name;
  std::unique_ptr<runner::KvAttention> attention;
  quality::CacheQuality quality;
  std::vector<WindowReport> windows;
  std::vector<LayerError> layers;
  double prefill_seconds = 0;
  int64_t prefill_tokens = 0;
  double decode_seconds = 0;
  int64_t decode_tokens = 0;
};

class Comparison {
 public:
  Comparison(runner::Model& model, std::span<const int> tokens, const ComparisonPlan& plan,
             const Engine& engine, Progress& progress)
      : model_(model), tokens_(tokens), plan_(plan), engine_(engine), progress_(progress) {}

  Status run() {
    KVX_RETURN_IF_ERROR(create_caches());
    KVX_RETURN_IF_ERROR(measure_attention());
    for (int w = 0; w < plan_.num_windows; ++w) KVX_RETURN_IF_ERROR(run_window(w));
    return {};
  }

  Result<std::vector<CacheReport>> reports() const;

 private:
  Status create_caches();
  Status measure_attention();
  Status run_window(int window);
  Status forward_window(int window, Subject& subject, std::vector<float>& hidden);
  Status feed(std::span<const int> tokens, runner::AttentionBackend& attention, float* hidden);
  Status decode(std::span<const int> tokens, runner::AttentionBackend& attention, float* hidden);
  void show_progress(std::string_view doing) { progress_.show(done_tokens_ / all_tokens(), doing); }

  std::span<const int> window_tokens(int window) const {
    return tokens_.subspan(static_cast<size_t>(window) * plan_.context, plan_.context);
  }
  // The forward passes that all of this takes, in tokens.
  double all_tokens() const {
    return static_cast<double>(plan_.context) *
           static_cast<double>(1 + plan_.num_windows * subjects_.size());
  }

  runner::Model& model_;
  std::span<const int> tokens_;
  const ComparisonPlan& plan_;
  const Engine& engine_;
  Progress& progress_;
  std::vector<Subject> subjects_;  // the base first
  double done_tokens_ = 0;
  std::string doing_;
};

Status Comparison::create_caches() {
  for (const runner::KvAttentionOptions& options : plan_.caches) {
    Subject subject;
    subject.name = options.recipe.text;
    KVX_ASSIGN_OR_RETURN(subject.attention,
                         runner::KvAttention::create(model_.config(), options, *engine_.executor));
    subjects_.push_back(std::move(subject));
  }
  return {};
}

// tokens in pieces, so that the progress line moves. hidden: [tokens, hidden], or null.
Status Comparison::feed(std::span<const int> tokens, runner::AttentionBackend& attention,
                        float* hidden) {
  for (size_t first = 0; first < tokens.size(); first += kPieceTokens) {
    const size_t count = std::min<size_t>(kPieceTokens, tokens.size() - first);
    float* target = hidden == nullptr ? nullptr : hidden + first * model_.config().hidden;
    KVX_RETURN_IF_ERROR(model_.forward(tokens.subspan(first, count), attention, target));
    done_tokens_ += static_cast<double>(count);
    show_progress(doing_);
  }
  return {};
}

// One token after the other, each with its logits, as when a text is written.
Status Comparison::decode(std::span<const int> tokens, runner::AttentionBackend& attention,
                          float* hidden) {
  std::vector<float> logits(model_.config().vocab_size);
  for (size_t t = 0; t < tokens.size(); ++t) {
    float* target = hidden + t * model_.config().hidden;
    KVX_RETURN_IF_ERROR(model_.forward(tokens.subspan(t, 1), attention, target));
    KVX_RETURN_IF_ERROR(model_.logits(target, 1, logits.data()));
  }
  done_tokens_ += static_cast<double>(tokens.size());
  return {};
}

// All caches see the first window's q, k and v of the base cache.
Status Comparison::measure_attention() {
  const runner::ModelConfig& config = model_.config();
  std::vector<runner::AttentionBackend*> shadows;
  for (size_t s = 1; s < subjects_.size(); ++s) shadows.push_back(subjects_[s].attention.get());
  ShadowAttention attention(*subjects_.front().attention, shadows, config.num_layers,
                            config.q_size(), first_scored(plan_.context));
  doing_ = "attention of all caches";
  show_progress(doing_);
  KVX_RETURN_IF_ERROR(feed(window_tokens(0), attention, nullptr));
  subjects_.front().layers.assign(config.num_layers, {1.0, 0.0});
  for (size_t s = 0; s < shadows.size(); ++s) {
    for (const quality::VectorError& error : attention.errors(s)) {
      subjects_[s + 1].layers.push_back({error.cosine_similarity(), error.relative_error()});
    }
  }
  return {};
}

// hidden: the states of the window's scored positions, [num_scored, hidden]. The last token is not
// fed: what it predicts lies outside the window.
Status Comparison::forward_window(int window, Subject& subject, std::vector<float>& hidden) {
  const int first = first_scored(plan_.context);
  const int scored = num_scored(plan_.context);
  const int decoded = window + 1 == plan_.num_windows ? std::min(kMostDecodedTokens, scored) : 0;
  const int prefilled = scored - decoded;
  const std::span<const int> tokens = window_tokens(window);
  const int64_t hidden_size = model_.config().hidden;
  hidden.resize(scored * hidden_size);
  runner::KvAttention& attention = *subject.attention;
  KVX_RETURN_IF_ERROR(attention.reset());

  const auto prefill_start = Clock::now();
  KVX_RETURN_IF_ERROR(feed(tokens.first(first), attention, nullptr));
  KVX_RETURN_IF_ERROR(feed(tokens.subspan(first, prefilled), attention, hidden.data()));
  const auto decode_start = Clock::now();
  KVX_RETURN_IF_ERROR(decode(tokens.subspan(first + prefilled, decoded), attention,
                             hidden.data() + prefilled * hidden_size));
  const auto end = Clock::now();
  subject.prefill_seconds += std::chrono::duration<double>(decode_start - prefill_start).count();
  subject.prefill_tokens += first + prefilled;
  subject.decode_seconds += std::chrono::duration<double>(end - decode_start).count();
  subject.decode_tokens += decoded;
  return {};
}

// What one window alone says.
WindowReport report_of(std::span<const ScoredToken> tokens) {
  quality::CacheQuality window;
  window.add_window(tokens);
  return {window.perplexity().value, window.kl().value};
}

Status Comparison::run_window(int window) {
  std::vector<std::vector<float>> hidden(subjects_.size());
  for (size_t s = 0; s < subjects_.size(); ++s) {
    doing_ = fmt::format("window {} of {}, {}", window + 1, plan_.num_windows, subjects_[s].name);
    show_progress(doing_);
    KVX_RETURN_IF_ERROR(forward_window(window, subjects_[s], hidden[s]));
  }
  const std::span<const int> targets =
      window_tokens(window).subspan(first_scored(plan_.context) + 1, num_scored(plan_.context));
  KVX_ASSIGN_OR_RETURN(const auto scores, score_window(model_, hidden, targets, *engine_.executor));
  for (size_t s = 0; s < subjects_.size(); ++s) {
    subjects_[s].quality.add_window(scores[s]);
    subjects_[s].windows.push_back(report_of(scores[s]));
  }
  return {};
}

double rate(int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

Result<std::vector<CacheReport>> Comparison::reports() const {
  std::vector<CacheReport> reports;
  for (const Subject& subject : subjects_) {
    const kv::KvCache& cache = subject.attention->cache();
    KVX_ASSIGN_OR_RETURN(const kv::RecipeCost cost, kv::cost_of(cache.config(), plan_.context));
    CacheReport report;
    report.name = subject.name;
    report.bits_per_value = cost.bits_per_value;
    report.bytes_per_token = cost.bytes_per_token;
    report.tokens_per_gib = cost.tokens_per_gib;
    report.perplexity = subject.quality.perplexity();
    report.change_percent = subject.quality.change_percent();
    report.kl = subject.quality.kl();
    report.same_top_percent = subject.quality.same_top_percent();
    report.windows = subject.windows;
    report.layers = subject.layers;
    report.prefill_tokens_per_second = rate(subject.prefill_tokens, subject.prefill_seconds);
    report.decode_tokens_per_second = rate(subject.decode_tokens, subject.decode_seconds);
    report.nonfinite_inputs = cache.nonfinite_inputs();
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace

Result<std::vector<CacheReport>> compare_caches(runner::Model& model, std::span<const int> tokens,
                                                const ComparisonPlan& plan, const Engine& engine,
                                                Progress& progress) {
  Comparison comparison(model, tokens, plan, engine, progress);
  KVX_RETURN_IF_ERROR(comparison.run());
  return comparison.reports();
}

}  // namespace kvx::tool
