// Budget: other formats for some layers, K and V apart, until a cache keeps a limit or uses up its
// bits.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/kvx/tune/tuner.hpp"

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

// One side of one layer in one format: what it costs and how far off it is.
struct FormatError {
  std::string format;
  double bits = 0;
  std::vector<double> errors;  // [num_layers], ProxyAttention's
};
// The formats of a side, fewest bits first: the recipe's own first, 16 bits last.
struct SideLadder {
  std::vector<FormatError> formats;
};
// What K or V of a recipe may be widened to, without errors yet. Dual-scale formats are among them
// where the cache can hold their blocks.
Result<SideLadder> ladder_of(const kv::Recipe& recipe, int head_dim, int block_size, bool is_k);

// Which format of its ladder every layer's K and V have.
class Assignment {
 public:
  Assignment(SideLadder k, SideLadder v, int num_layers);

  double bits() const;   // a number, averaged over layers and sides
  double error() const;  // the sum over layers and sides
  // Widens the layer's side that loses the most error a bit. False: all are as wide as can be, or
  // none is left whose bits go below most_bits.
  bool widen(double most_bits);

  LayerFormats formats(int layer) const;
  double bits(int layer) const;
  double error(int layer, bool is_k) const;

 private:
  struct Step;
  std::optional<Step> best_step(double most_bits) const;

  SideLadder sides_[2];          // K, V
  std::vector<int> formats_[2];  // [num_layers], of the ladder
};

class Budget {
 public:
  // All arguments outlive it.
  Budget(runner::Model& model, const Corpus& corpus, int context, int block_size,
         const Engine& engine, Work& work, Tuner& tuner)
      : model_(model),
        corpus_(corpus),
        context_(context),
        block_size_(block_size),
        engine_(engine),
        work_(work),
        tuner_(tuner) {}

  // The cheapest plan found that keeps the goal, or the best there is. The candidate's recipe is
  // the cheapest; its options and tables stay.
  Result<Candidate> plan(const Candidate& cheapest, const Goal& goal);

  // Of the plan. Requires: plan() was called.
  const Assignment& assignment() const { return *assignment_; }

 private:
  Status measure(const Candidate& cheapest, SideLadder& k, SideLadder& v);
  Candidate planned(const Candidate& cheapest) const;
  Result<Candidate> widen_until_kept(const Candidate& cheapest, const Goal& goal);

  runner::Model& model_;
  const Corpus& corpus_;
  int context_;
  int block_size_;
  const Engine& engine_;
  Work& work_;
  Tuner& tuner_;
  std::optional<Assignment> assignment_;
};

}  // namespace kvx::tool
