// Tuner: statistics of a model on prompts, caches calibrated from them, and what each is worth.
#pragma once

#include <optional>
#include <vector>

#include "tools/kvx/tune/candidate.hpp"
#include "tools/kvx/tune/corpus.hpp"
#include "tools/kvx/tune/judge.hpp"
#include "tune/statistics.hpp"

namespace kvx::tool {

// An option that was tried, and what the cache loses with it.
struct TriedOption {
  std::string name;
  quality::Estimate kl;
  quality::Estimate change_percent;
  bool is_kept = false;
};

class Tuner {
 public:
  // All arguments outlive the tuner.
  Tuner(runner::Model& model, const Corpus& corpus, const CacheSetup& setup, const Engine& engine,
        Work& work);

  // Runs the prompts. The errors of Statistics: a NaN, named by its layer.
  Status collect();
  const tune::Statistics& statistics() const { return *statistics_; }

  // The cache of a candidate, its tables fitted. Where scales are fitted too, the prompts run
  // again, through the candidate's transforms.
  Result<runner::KvAttentionOptions> fit(const Candidate& candidate);

  // On the windows that options are chosen on, and on those that the result is judged on.
  Result<quality::CacheQuality> select(const Candidate& candidate);
  Result<quality::CacheQuality> verify(const Candidate& candidate);

  // Tries one option after the other on a recipe and keeps those that lower the divergence by more
  // than 2 %; `percentile` is what given scales may clip at. tried: the recipe itself first.
  Result<Candidate> choose_options(const std::string& recipe, double percentile,
                                   std::vector<TriedOption>& tried);

 private:
  Status run_prompts(runner::AttentionBackend& backend, runner::KvAttention& base,
                     const std::string& doing);
  // Statistics of what the candidate quantises, for its scales.
  Status collect_transformed(const Candidate& candidate, std::span<const kv::LayerPlan> plans,
                             std::span<const kv::LayerCalibration> tables);
  Status fit_scales(const Candidate& candidate, std::span<const kv::LayerPlan> plans,
                    std::vector<kv::LayerCalibration>& tables);
  kv::CacheGeometry geometry() const;

  runner::Model& model_;
  const Corpus& corpus_;
  CacheSetup setup_;
  const Engine& engine_;
  Work& work_;
  std::optional<tune::Statistics> statistics_;
  std::optional<tune::Statistics> transformed_;
  Candidate transformed_of_;  // less its scales
  Judge selection_;
  Judge verification_;
};

}  // namespace kvx::tool
