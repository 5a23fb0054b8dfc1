// Budget: other formats for some layers or heads, K and V apart, until a cache keeps a limit or
// uses up its bits.
#pragma once

#include <optional>

#include "tools/kvx/tune/assignment.hpp"
#include "tools/kvx/tune/goal.hpp"
#include "tools/kvx/tune/tuner.hpp"

namespace kvx::tool {

class Budget {
 public:
  // What is widened at a time: one KV head of a layer, or all of them.
  enum class Unit { kHead, kLayer };

  // All arguments outlive it.
  Budget(runner::Model& model, const Corpus& corpus, const CacheSetup& setup, Unit unit,
         const Engine& engine, Work& work, Tuner& tuner)
      : model_(model),
        corpus_(corpus),
        setup_(setup),
        num_parts_(unit == Unit::kHead ? model.config().num_kv_heads : 1),
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
  CacheSetup setup_;
  int num_parts_;  // of a layer
  const Engine& engine_;
  Work& work_;
  Tuner& tuner_;
  std::optional<Assignment> assignment_;
};

}  // namespace kvx::tool
