// Every cache reads a text once; each question is asked on a fork of it.
#include "tools/kvx/stress/stress_run.hpp"

#include <algorithm>
#include <limits>

#include "quality/logits.hpp"
#include "runner/sampler.hpp"
#include "tools/kvx/compare/window_scores.hpp"

namespace kvx::tool {
namespace {

using quality::ClusteredMean;
using quality::Estimate;
using quality::RetrievalTask;

constexpr int kFedTokens = 256;  // between two updates of the progress line
constexpr std::string_view kOpening = "once upon a time there was";

Estimate estimate_of(const ClusteredMean& mean, double factor = 1) {
  return {factor * mean.mean(), factor * mean.standard_error()};
}

struct AskedQuestion {
  std::vector<int> question;
  std::vector<int> answer;
};

struct AskedText {
  std::vector<int> text;
  std::vector<AskedQuestion> questions;
};

// Sums of one cache, task and length. A question is a cluster: its answer's tokens err together.
struct Scores {
  ClusteredMean exact;
  ClusteredMean nll;
  ClusteredMean change;
};

class Stress {
 public:
  Stress(runner::Model& model, const runner::Tokenizer& tokenizer, const StressPlan& plan,
         const Engine& engine, Progress& progress)
      : model_(model), tokenizer_(tokenizer), plan_(plan), engine_(engine), progress_(progress) {}

  Status run(StressReport& report) {
    KVX_RETURN_IF_ERROR(create_caches());
    for (const int64_t length : plan_.lengths) {
      for (const RetrievalTask task : quality::kRetrievalTasks) {
        KVX_ASSIGN_OR_RETURN(RetrievalReport one, retrieve(task, length));
        report.retrieval.push_back(std::move(one));
      }
    }
    if (plan_.drift_tokens > 0) {
      KVX_ASSIGN_OR_RETURN(report.drift, drift());
    }
    return describe_caches(report);
  }

 private:
  Status create_caches();
  Status describe_caches(StressReport& report) const;
  Result<RetrievalReport> retrieve(RetrievalTask task, int64_t length);
  Result<AskedText> make_text(RetrievalTask task, int64_t length, int sample) const;
  Status ask(const AskedText& text, std::vector<Scores>& scores);
  Result<std::vector<double>> nlls_of(const AskedQuestion& asked, runner::KvAttention& cache,
                                      bool& is_exact);
  Result<std::vector<int>> write_text();
  Result<std::vector<DriftPart>> drift();
  Status feed(std::span<const int> tokens, runner::AttentionBackend& attention, float* hidden);
  std::vector<int> with_bos(std::vector<int> tokens) const;
  double all_tokens() const;

  runner::Model& model_;
  const runner::Tokenizer& tokenizer_;
  const StressPlan& plan_;
  const Engine& engine_;
  Progress& progress_;
  std::vector<std::unique_ptr<runner::KvAttention>> caches_;
  std::string doing_;
  double done_tokens_ = 0;
};

Status Stress::create_caches() {
  for (runner::KvAttentionOptions options : plan_.caches) {
    options.max_sequences = 2;  // a text and its fork
    KVX_ASSIGN_OR_RETURN(auto cache,
                         runner::KvAttention::create(model_.config(), options, *engine_.executor));
    caches_.push_back(std::move(cache));
  }
  return {};
}

Status Stress::describe_caches(StressReport& report) const {
  for (const auto& attention : caches_) {
    const kv::KvCache& cache = attention->cache();
    KVX_ASSIGN_OR_RETURN(const kv::RecipeCost cost,
                         kv::cost_of(cache.config(), cache.config().max_tokens_per_sequence));
    StressCache one;
    one.name = cache.config().recipe.text;
    one.bits_per_value = cost.bits_per_value;
    one.nonfinite_inputs = cache.nonfinite_inputs();
    KVX_ASSIGN_OR_RETURN(one.saturation, cache.head_counts());
    report.caches.push_back(std::move(one));
  }
  return {};
}

// Of all that is fed, roughly: questions are short.
double Stress::all_tokens() const {
  double of_cache = plan_.drift_tokens;
  for (const int64_t length : plan_.lengths) {
    of_cache +=
        static_cast<double>(length * plan_.num_samples * std::ssize(quality::kRetrievalTasks));
  }
  return of_cache * static_cast<double>(caches_.size()) + plan_.drift_tokens;
}

Status Stress::feed(std::span<const int> tokens, runner::AttentionBackend& attention,
                    float* hidden) {
  for (size_t first = 0; first < tokens.size(); first += kFedTokens) {
    const size_t count = std::min<size_t>(kFedTokens, tokens.size() - first);
    float* target = hidden == nullptr ? nullptr : hidden + first * model_.config().hidden;
    KVX_RETURN_IF_ERROR(model_.forward(tokens.subspan(first, count), attention, target));
    done_tokens_ += static_cast<double>(count);
    progress_.show(std::min(1.0, done_tokens_ / all_tokens()), doing_);
  }
  return {};
}

std::vector<int> Stress::with_bos(std::vector<int> tokens) const {
  if (tokenizer_.adds_bos() && tokenizer_.bos()) tokens.insert(tokens.begin(), *tokenizer_.bos());
  return tokens;
}

// ---- retrieval

Result<AskedText> Stress::make_text(RetrievalTask task, int64_t length, int sample) const {
  const auto encode = [&](std::string_view text) {
    return tokenizer_.encode(text, runner::SpecialTokens::kAsText);
  };
  const auto count = [&](std::string_view text) -> Result<int64_t> {
    KVX_ASSIGN_OR_RETURN(const std::vector<int> tokens, encode(text));
    return std::ssize(tokens);
  };
  const int64_t room = length - std::ssize(with_bos({}));
  const uint64_t seed = plan_.seed * 1000003 + static_cast<uint64_t>(length) * 101 +
                        static_cast<uint64_t>(sample) * 7 + static_cast<uint64_t>(task);
  KVX_ASSIGN_OR_RETURN(const quality::RetrievalText made,
                       quality::make_retrieval_text(task, seed, room, count));
  AskedText asked;
  KVX_ASSIGN_OR_RETURN(std::vector<int> text, encode(made.text));
  asked.text = with_bos(std::move(text));
  for (const quality::Question& one : made.questions) {
    AskedQuestion question;
    KVX_ASSIGN_OR_RETURN(question.question, encode(one.question));
    KVX_ASSIGN_OR_RETURN(question.answer, encode(one.answer));
    asked.questions.push_back(std::move(question));
  }
  return asked;
}

Result<RetrievalReport> Stress::retrieve(RetrievalTask task, int64_t length) {
  std::vector<Scores> scores(caches_.size());
  RetrievalReport report;
  report.task = task;
  report.length = length;
  for (int sample = 0; sample < plan_.num_samples; ++sample) {
    doing_ = fmt::format("{}, {} tokens, text {} of {}", name_of(task), length, sample + 1,
                         plan_.num_samples);
    KVX_ASSIGN_OR_RETURN(const AskedText text, make_text(task, length, sample));
    report.num_questions += static_cast<int>(text.questions.size());
    KVX_RETURN_IF_ERROR(ask(text, scores));
  }
  for (const Scores& one : scores) {
    report.scores.push_back(
        {estimate_of(one.exact, 100), estimate_of(one.nll), estimate_of(one.change)});
  }
  return report;
}

Status Stress::ask(const AskedText& text, std::vector<Scores>& scores) {
  std::vector<std::vector<double>> base;  // [questions][answer tokens]
  for (size_t c = 0; c < caches_.size(); ++c) {
    runner::KvAttention& cache = *caches_[c];
    KVX_RETURN_IF_ERROR(cache.reset());
    KVX_RETURN_IF_ERROR(feed(text.text, cache, nullptr));
    for (size_t i = 0; i < text.questions.size(); ++i) {
      bool is_exact = false;
      KVX_ASSIGN_OR_RETURN(const std::vector<double> nlls,
                           nlls_of(text.questions[i], cache, is_exact));
      if (c == 0) base.push_back(nlls);
      std::vector<double> change;
      for (size_t t = 0; t < nlls.size(); ++t) change.push_back(nlls[t] - base[i][t]);
      const double exact = is_exact ? 1 : 0;
      scores[c].exact.add_cluster({&exact, 1});
      scores[c].nll.add_cluster(nlls);
      scores[c].change.add_cluster(change);
    }
  }
  return {};
}

// Of the answer's tokens, each after the ones before it: where every one of them comes first, the
// model would have written the answer.
Result<std::vector<double>> Stress::nlls_of(const AskedQuestion& asked, runner::KvAttention& cache,
                                            bool& is_exact) {
  std::vector<int> tokens = asked.question;
  tokens.insert(tokens.end(), asked.answer.begin(), asked.answer.end() - 1);
  const size_t hidden_size = static_cast<size_t>(model_.config().hidden);
  std::vector<float> hidden(tokens.size() * hidden_size);
  KVX_RETURN_IF_ERROR(cache.fork());
  const Status fed = model_.forward(tokens, cache, hidden.data());
  KVX_RETURN_IF_ERROR(cache.return_from_fork());
  KVX_RETURN_IF_ERROR(fed);

  const auto count = static_cast<int>(asked.answer.size());
  const auto vocabulary = static_cast<size_t>(model_.config().vocab_size);
  std::vector<float> logits(count * vocabulary);
  KVX_RETURN_IF_ERROR(model_.logits(hidden.data() + (asked.question.size() - 1) * hidden_size,
                                    count, logits.data()));
  std::vector<double> nlls;
  is_exact = true;
  for (int t = 0; t < count; ++t) {
    const std::span<const float> row(logits.data() + t * vocabulary, vocabulary);
    const quality::LogitSummary summary = quality::summarize(row);
    nlls.push_back(quality::negative_log_likelihood(row, summary, asked.answer[t]));
    is_exact = is_exact && summary.top == asked.answer[t];
  }
  return nlls;
}

// ---- drift

// What the base cache's model writes: drawn, since the likeliest words soon repeat themselves, and
// never a special token, so that it goes on.
Result<std::vector<int>> Stress::write_text() {
  runner::SamplingOptions sampling;
  sampling.temperature = 1.0f;
  sampling.top_p = 0.95f;
  sampling.seed = plan_.seed;
  KVX_ASSIGN_OR_RETURN(runner::Sampler sampler, runner::Sampler::create(sampling));
  KVX_ASSIGN_OR_RETURN(const std::vector<int> opening,
                       tokenizer_.encode(kOpening, runner::SpecialTokens::kAsText));
  std::vector<int> tokens = with_bos(opening);
  const size_t first = tokens.size();
  std::vector<float> hidden(tokens.size() * model_.config().hidden);
  std::vector<float> logits(model_.config().vocab_size);
  doing_ = fmt::format("writing {} tokens", plan_.drift_tokens);
  runner::KvAttention& base = *caches_.front();
  KVX_RETURN_IF_ERROR(base.reset());
  KVX_RETURN_IF_ERROR(feed(tokens, base, hidden.data()));
  const float* last = hidden.data() + (tokens.size() - 1) * model_.config().hidden;
  while (tokens.size() < first + plan_.drift_tokens) {
    KVX_RETURN_IF_ERROR(model_.logits(last, 1, logits.data()));
    for (int token = 0; token < tokenizer_.size(); ++token) {
      if (tokenizer_.is_special(token)) logits[token] = -std::numeric_limits<float>::infinity();
    }
    tokens.push_back(sampler.sample(logits));
    KVX_RETURN_IF_ERROR(feed(std::span(tokens).last(1), base, hidden.data()));
    last = hidden.data();
  }
  return tokens;
}

// All caches read what the base wrote; one that reads token by token stores and sees the same.
Result<std::vector<DriftPart>> Stress::drift() {
  KVX_ASSIGN_OR_RETURN(const std::vector<int> tokens, write_text());
  const size_t hidden_size = static_cast<size_t>(model_.config().hidden);
  const size_t first = tokens.size() - plan_.drift_tokens;
  std::vector<std::vector<float>> hidden(caches_.size());
  for (size_t c = 0; c < caches_.size(); ++c) {
    doing_ = fmt::format("drift of {}", caches_[c]->cache().config().recipe.text);
    KVX_RETURN_IF_ERROR(caches_[c]->reset());
    KVX_RETURN_IF_ERROR(feed(std::span(tokens).first(first - 1), *caches_[c], nullptr));
    hidden[c].resize(plan_.drift_tokens * hidden_size);
    const auto read = std::span(tokens).subspan(first - 1, plan_.drift_tokens);
    KVX_RETURN_IF_ERROR(feed(read, *caches_[c], hidden[c].data()));
  }
  KVX_ASSIGN_OR_RETURN(
      const auto scores,
      score_window(model_, hidden, std::span(tokens).subspan(first), *engine_.executor));
  const int num_parts = std::min(kDriftParts, plan_.drift_tokens);
  std::vector<DriftPart> parts;
  for (int p = 0; p < num_parts; ++p) {
    const int64_t begin = int64_t{plan_.drift_tokens} * p / num_parts;
    const int64_t end = int64_t{plan_.drift_tokens} * (p + 1) / num_parts;
    DriftPart part{begin, end - begin, {}, {}};
    for (const std::vector<quality::ScoredToken>& of_cache : scores) {
      quality::CacheQuality quality;
      quality.add_window(std::span(of_cache).subspan(begin, end - begin));
      part.kl.push_back(quality.kl());
      part.same_top.push_back(quality.same_top_percent());
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace

Status run_stress(runner::Model& model, const runner::Tokenizer& tokenizer, const StressPlan& plan,
                  const Engine& engine, Progress& progress, StressReport& report) {
  Stress stress(model, tokenizer, plan, engine, progress);
  return stress.run(report);
}

}  // namespace kvx::tool
