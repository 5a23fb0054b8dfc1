// Gates: limits on what a cache may lose, read from text such as "ppl>0.2%,kl>0.01,cosine<0.999".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/result.hpp"

namespace kvx::quality {

// What a gate looks at. Attention's figures are those of the worst layer and KV head, those of long
// texts of the worst length or part.
enum class Figure {
  kPerplexityChange,  // ppl: percent
  kKl,                // kl: nats a token
  kSameTop,           // top1: percent of tokens where both caches put the same token first
  kOutputCosine,      // cosine: of attention's outputs
  kOutputError,       // error: their relative error
  kLogitCosine,       // logit_cosine: of attention's logits, q k before the softmax
  kLogitError,        // logit_error: their relative error
  kSaturated,         // saturated: inputs that a static scale clipped
  kNonfinite,         // nonfinite: inputs that no code can express
  kPasskey,           // passkey: percent of questions with the whole right answer
  kNeedles,           // needles: likewise
  kEntities,          // entities: likewise
  kAnswerNll,         // nll: change of the answers' negative log-likelihood, nats a token
  kDrift,             // drift: KL divergence in a part of a text that the model writes
};

// Who measures: each has figures of its own, and both count inputs.
enum class GateUse { kCompare, kStress };

std::string_view name_of(Figure figure);

struct Gate {
  Figure figure;
  double limit;
  std::string text;  // as it was written, "kl>0.01"

  // A figure that is no number fails: nothing is known of it.
  bool fails(double value) const;
  bool is_percent() const;
};

// One condition or more, separated by commas; a cache fails when one of them is true. A condition
// is a name, the one sign that makes sense for it, and a number; percentages want a percent sign.
// INVALID_ARGUMENT names the condition and what was expected, another use's figures included.
Result<std::vector<Gate>> parse_gates(std::string_view text, GateUse use = GateUse::kCompare);

// Whether one of them looks at attention's logits, which are measured only when wanted.
bool need_logits(const std::vector<Gate>& gates);

}  // namespace kvx::quality
