// Goal: what a budget limits: the divergence, the change of perplexity, or the bits.
#pragma once

#include <string>

#include "core/result.hpp"
#include "quality/cache_quality.hpp"

namespace kvx::tool {

// What --budget and --bits ask for.
struct Goal {
  enum class Kind { kNone, kKl, kPerplexity, kBits };
  Kind kind = Kind::kNone;
  double limit = 0;  // nats, percent or bits a number

  // The limited measure of what was judged; NaN where bits are the goal.
  double measure(const quality::CacheQuality& quality) const;
  bool is_kept(const quality::CacheQuality& quality) const;
  std::string text() const;  // "kl=0.01"
};

// budget: "kl=0.01", "ppl=0.5%" or empty; bits: 0 for none. INVALID_ARGUMENT: both, another word,
// or a limit that is not positive.
Result<Goal> parse_goal(const std::string& budget, double bits);

}  // namespace kvx::tool
