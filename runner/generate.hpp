// generate: a prompt through the model, then one token at a time until the model or the limit ends.
#pragma once

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "runner/model.hpp"
#include "runner/sampler.hpp"
#include "runner/tokenizer.hpp"

namespace kvx::runner {

struct GenerateOptions {
  int max_tokens = 256;
  SamplingOptions sampling;
  // Called with the number of prompt tokens fed so far; an error ends the prefill (Model::forward).
  Model::OnStep on_prefill = {};
};

struct GenerateResult {
  std::vector<int> tokens;  // without the one that ended it
  int prompt_tokens = 0;
  double prefill_seconds = 0;  // the prompt and the first token's logits
  double decode_seconds = 0;   // decoded_tokens forward passes of one token, logits and choice
  int decoded_tokens = 0;
  bool model_ended = false;  // false: max_tokens
};

// on_text gets whole UTF-8 characters as they come; false stops. INVALID_ARGUMENT: an empty prompt.
// OUT_OF_RANGE: the cache or the context ends first. Tokens of the prompt and of the answer, its
// ending one included, stay in the backend, so that a chat goes on from there.
Result<GenerateResult> generate(Model& model, const Tokenizer& tokenizer, AttentionBackend& backend,
                                std::span<const int> prompt, const GenerateOptions& options,
                                const std::function<bool(std::string_view)>& on_text);

}  // namespace kvx::runner
