// The loop, and the clock that the reported tokens per second come from.
#include "runner/generate.hpp"

#include <chrono>
#include <cmath>
#include <string>

namespace kvx::runner {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Holds back a character until all its bytes are there.
class Utf8Stream {
 public:
  explicit Utf8Stream(const std::function<bool(std::string_view)>& on_text) : on_text_(on_text) {}

  bool add(std::string_view bytes) {
    pending_ += bytes;
    const size_t length = complete_utf8_length(pending_);
    const bool go_on = length == 0 || on_text_(std::string_view(pending_).substr(0, length));
    pending_.erase(0, length);
    return go_on;
  }
  void finish() {
    if (!pending_.empty()) on_text_(pending_);
  }

 private:
  const std::function<bool(std::string_view)>& on_text_;
  std::string pending_;
};

// Feeds tokens and computes the logits after the last one.
Status logits_after(Model& model, AttentionBackend& backend, std::span<const int> tokens,
                    std::vector<float>& logits, const Model::OnStep& on_step = {}) {
  logits.resize(static_cast<size_t>(model.config().vocab_size));
  KVX_RETURN_IF_ERROR(model.forward_to_logits(tokens, backend, logits.data(), on_step));
  // A number lost in the weights or the cache must not end as a plausible token.
  for (const float logit : logits) {
    if (!std::isnan(logit)) continue;
    return internal_error("the logits after token {} are NaN: the model or its cache lost a number",
                          backend.num_tokens() - 1);
  }
  return {};
}

}  // namespace

Result<GenerateResult> generate(Model& model, const Tokenizer& tokenizer, AttentionBackend& backend,
                                std::span<const int> prompt, const GenerateOptions& options,
                                const std::function<bool(std::string_view)>& on_text) {
  if (prompt.empty()) return invalid_argument("the prompt is empty; a token was expected");
  if (tokenizer.size() != model.config().vocab_size) {
    return invalid_argument("the tokenizer has {} tokens; the model's vocabulary has {}",
                            tokenizer.size(), model.config().vocab_size);
  }
  KVX_ASSIGN_OR_RETURN(Sampler sampler, Sampler::create(options.sampling));
  GenerateResult result;
  result.prompt_tokens = static_cast<int>(prompt.size());
  std::vector<float> logits;
  const auto prefill_start = Clock::now();
  KVX_RETURN_IF_ERROR(logits_after(model, backend, prompt, logits, options.on_prefill));
  result.prefill_seconds = seconds_since(prefill_start);

  Utf8Stream stream(on_text);
  const auto decode_start = Clock::now();
  bool go_on = options.max_tokens > 0;
  while (go_on) {
    const int token = sampler.sample(logits);
    result.model_ended = tokenizer.ends_generation(token);
    if (!result.model_ended) {
      result.tokens.push_back(token);
      go_on = stream.add(tokenizer.decode(token)) &&
              static_cast<int>(result.tokens.size()) < options.max_tokens;
    }
    go_on = go_on && !result.model_ended;
    KVX_RETURN_IF_ERROR(logits_after(model, backend, std::span(&token, 1), logits));
    ++result.decoded_tokens;
  }
  result.decode_seconds = seconds_since(decode_start);
  stream.finish();
  return result;
}

}  // namespace kvx::runner
