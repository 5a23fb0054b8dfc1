// The windows' loop: forward passes per cache, then scores for all caches together.
#include "tools/kvx/compare/comparison.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "tools/kvx/compare/logit_errors.hpp"
#include "tools/kvx/compare/shadow_attention.hpp"
#include "tools/kvx/compare/window_scores.hpp"

namespace kvx::tool {
namespace {

using Clock = std::chrono::steady_clock;
using quality::ScoredToken;

constexpr int kMostDecodedTokens = 32;
constexpr int kTokensPerTurn = 4;  // decoded by a cache before the next one's turn
constexpr int kFedTokens = 256;    // between two updates of the progress line
constexpr int kLogitStride = 64;   // of the scored tokens, every 64th shows its attention logits

// One cache and its measurements so far.
struct Subject {
  std::string name;
  std::unique_ptr<runner::KvAttention> attention;
  quality::CacheQuality quality;
  std::vector<WindowReport> windows;
  std::vector<LayerError> layers;
  std::vector<LayerError> heads;        // [num_layers, num_kv_heads]
  std::vector<LayerError> logit_heads;  // likewise; empty where they are not measured
  std::vector<double> prefill_speeds;   // [windows], tokens a second
  std::vector<double> decode_speeds;    // [turns of the last window]
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
  Status measure_logits(ShadowAttention& attention, LogitErrors& logits);
  Status run_window(int window);
  Status prefill_window(int window, Subject& subject, std::vector<float>& hidden);
  Status decode_in_turns(int window, std::vector<std::vector<float>>& hidden);
  Status feed(std::span<const int> tokens, runner::AttentionBackend& attention, float* hidden);
  Status decode(std::span<const int> tokens, runner::AttentionBackend& attention, float* hidden);
  void show_progress(std::string_view doing) { progress_.show(done_tokens_ / all_tokens(), doing); }

  std::span<const int> window_tokens(int window) const {
    return tokens_.subspan(static_cast<size_t>(window) * plan_.context, plan_.context);
  }
  // Tokens of a window that are fed one by one: of the last one alone.
  int num_decoded(int window) const {
    const bool is_last = window + 1 == plan_.num_windows;
    return is_last ? std::min(kMostDecodedTokens, num_scored(plan_.context)) : 0;
  }
  // The tokens of all forward passes.
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

// Feeds tokens part by part, so that the progress line moves. hidden: [tokens, hidden], or null.
Status Comparison::feed(std::span<const int> tokens, runner::AttentionBackend& attention,
                        float* hidden) {
  for (size_t first = 0; first < tokens.size(); first += kFedTokens) {
    const size_t count = std::min<size_t>(kFedTokens, tokens.size() - first);
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

std::vector<LayerError> errors_of(std::span<const quality::VectorError> errors) {
  std::vector<LayerError> measured;
  for (const quality::VectorError& error : errors) {
    measured.push_back({error.cosine_similarity(), error.relative_error()});
  }
  return measured;
}

// Of whole layers, from those of their heads.
std::vector<LayerError> layers_of(std::span<const quality::VectorError> heads, int num_heads) {
  std::vector<quality::VectorError> layers(heads.size() / num_heads);
  for (size_t i = 0; i < heads.size(); ++i) layers[i / num_heads].add(heads[i]);
  return errors_of(layers);
}

// All caches see the first window's q, k and v of the base cache.
Status Comparison::measure_attention() {
  const runner::ModelConfig& config = model_.config();
  std::vector<runner::AttentionBackend*> shadows;
  for (size_t s = 1; s < subjects_.size(); ++s) shadows.push_back(subjects_[s].attention.get());
  const int first = first_scored(plan_.context);
  ShadowAttention attention(*subjects_.front().attention, shadows, config.num_layers,
                            config.q_size(), config.attended_size(), config.num_kv_heads, first);
  LogitErrors logits({config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim},
                     shadows.size());
  doing_ = "attention of all caches";
  show_progress(doing_);
  if (plan_.measures_logits) {
    KVX_RETURN_IF_ERROR(measure_logits(attention, logits));
  } else {
    KVX_RETURN_IF_ERROR(feed(window_tokens(0), attention, nullptr));
  }
  const size_t num_heads = static_cast<size_t>(config.num_layers) * config.num_kv_heads;
  Subject& base = subjects_.front();
  base.layers.assign(config.num_layers, {1.0, 0.0});
  base.heads.assign(num_heads, {1.0, 0.0});
  if (plan_.measures_logits) base.logit_heads = base.heads;
  for (size_t s = 0; s < shadows.size(); ++s) {
    Subject& subject = subjects_[s + 1];
    subject.layers = layers_of(attention.errors(s), config.num_kv_heads);
    subject.heads = errors_of(attention.errors(s));
    if (plan_.measures_logits) subject.logit_heads = errors_of(logits.errors(s));
  }
  return {};
}

// Between two steps the caches hold what the last query saw: a later token may push a block out of
// a full-precision window.
Status Comparison::measure_logits(ShadowAttention& attention, LogitErrors& logits) {
  std::vector<runner::KvAttention*> others;
  for (size_t s = 1; s < subjects_.size(); ++s) others.push_back(subjects_[s].attention.get());
  const std::span<const int> tokens = window_tokens(0);
  const size_t first = first_scored(plan_.context);
  KVX_RETURN_IF_ERROR(feed(tokens.first(first), attention, nullptr));
  for (size_t t = first; t < tokens.size(); t += kLogitStride) {
    const size_t count = std::min<size_t>(kLogitStride, tokens.size() - t);
    KVX_RETURN_IF_ERROR(feed(tokens.subspan(t, count), attention, nullptr));
    KVX_RETURN_IF_ERROR(logits.add(
        *subjects_.front().attention, others,
        [&](int layer) { return attention.last_query(layer); }, *engine_.executor));
  }
  return {};
}

double rate(int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

// hidden: the states of the window's scored positions, [num_scored, hidden]; of those that are
// decoded in turns, none yet. The last token is not fed: what it predicts lies outside the window.
Status Comparison::prefill_window(int window, Subject& subject, std::vector<float>& hidden) {
  const int first = first_scored(plan_.context);
  const int scored = num_scored(plan_.context);
  const int prefilled = scored - num_decoded(window);
  const std::span<const int> tokens = window_tokens(window);
  hidden.resize(scored * model_.config().hidden);
  runner::KvAttention& attention = *subject.attention;
  KVX_RETURN_IF_ERROR(attention.reset());
  const auto start = Clock::now();
  KVX_RETURN_IF_ERROR(feed(tokens.first(first), attention, nullptr));
  KVX_RETURN_IF_ERROR(feed(tokens.subspan(first, prefilled), attention, hidden.data()));
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  subject.prefill_speeds.push_back(rate(first + prefilled, seconds));
  return {};
}

// The window's last tokens, kTokensPerTurn of them through one cache and then through the next.
Status Comparison::decode_in_turns(int window, std::vector<std::vector<float>>& hidden) {
  const int decoded = num_decoded(window);
  const int prefilled = num_scored(plan_.context) - decoded;
  const std::span<const int> tokens =
      window_tokens(window).subspan(first_scored(plan_.context) + prefilled, decoded);
  for (int done = 0; done < decoded; done += kTokensPerTurn) {
    const int count = std::min(kTokensPerTurn, decoded - done);
    for (size_t s = 0; s < subjects_.size(); ++s) {
      float* const states = hidden[s].data() + int64_t{prefilled + done} * model_.config().hidden;
      const auto start = Clock::now();
      KVX_RETURN_IF_ERROR(decode(tokens.subspan(done, count), *subjects_[s].attention, states));
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      subjects_[s].decode_speeds.push_back(rate(count, seconds));
      show_progress(doing_);
    }
  }
  return {};
}

// The figures of one window alone.
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
    KVX_RETURN_IF_ERROR(prefill_window(window, subjects_[s], hidden[s]));
  }
  doing_ = fmt::format("window {} of {}, token by token", window + 1, plan_.num_windows);
  KVX_RETURN_IF_ERROR(decode_in_turns(window, hidden));
  const std::span<const int> targets =
      window_tokens(window).subspan(first_scored(plan_.context) + 1, num_scored(plan_.context));
  KVX_ASSIGN_OR_RETURN(const auto scores, score_window(model_, hidden, targets, *engine_.executor));
  for (size_t s = 0; s < subjects_.size(); ++s) {
    subjects_[s].quality.add_window(scores[s]);
    subjects_[s].windows.push_back(report_of(scores[s]));
  }
  return {};
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
    report.heads = subject.heads;
    report.logit_heads = subject.logit_heads;
    report.num_kv_heads = model_.config().num_kv_heads;
    report.prefill = speed_of(subject.prefill_speeds);
    report.decode = speed_of(subject.decode_speeds);
    report.nonfinite_inputs = cache.nonfinite_inputs();
    KVX_ASSIGN_OR_RETURN(report.saturation, cache.head_counts());
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
