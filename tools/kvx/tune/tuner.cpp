// Tuner: forward passes of prompts through collecting backends, and the trial of options.
#include "tools/kvx/tune/tuner.hpp"

#include <utility>

#include "runner/collecting_attention.hpp"
#include "tools/kvx/tune/options.hpp"
#include "tune/cuda/device_statistics.hpp"

namespace kvx::tool {
namespace {

// Below this share of the best divergence an option is kept: smaller gains are chance.
constexpr double kWorthwhile = 0.98;

}  // namespace

Tuner::Tuner(runner::Model& model, const Corpus& corpus, const CacheSetup& setup,
             const Engine& engine, Work& work)
    : model_(model),
      corpus_(corpus),
      setup_(setup),
      engine_(engine),
      work_(work),
      selection_(model, corpus.selection, engine, work),
      verification_(model, corpus.verification, engine, work) {}

kv::CacheGeometry Tuner::geometry() const {
  return runner::cache_config_of(model_.config(), {}).geometry;
}

Status Tuner::run_prompts(runner::AttentionBackend& backend, runner::KvAttention& base,
                          const std::string& doing) {
  for (size_t i = 0; i < corpus_.prompts.size(); ++i) {
    work_.begin(fmt::format("{}, prompt {} of {}", doing, i + 1, corpus_.prompts.size()));
    KVX_RETURN_IF_ERROR(base.reset());
    int64_t fed = 0;
    KVX_RETURN_IF_ERROR(model_.forward(corpus_.prompts[i], backend, nullptr, [&](int64_t num_fed) {
      work_.advance(num_fed - fed);
      fed = num_fed;
      return Status();
    }));
  }
  return {};
}

Status Tuner::collect() {
  KVX_ASSIGN_OR_RETURN(tune::Statistics statistics, runner::make_statistics(model_.config()));
  KVX_ASSIGN_OR_RETURN(const auto base, make_base_cache(model_, engine_, setup_));
  std::unique_ptr<tune::DeviceStatistics> on_gpu;  // rows are counted where they are
  if (setup_.on_gpu) {
    KVX_ASSIGN_OR_RETURN(on_gpu, tune::DeviceStatistics::create(statistics.config(), 0));
  }
  runner::CollectingAttention collecting(*base, statistics, engine_.context);
  collecting.count_on_gpu(on_gpu.get());
  KVX_RETURN_IF_ERROR(run_prompts(collecting, *base, "collecting"));
  if (on_gpu) KVX_RETURN_IF_ERROR(on_gpu->drain(statistics));
  KVX_RETURN_IF_ERROR(statistics.check_complete());
  statistics_ = std::move(statistics);
  return {};
}

Status Tuner::collect_transformed(const Candidate& candidate, std::span<const kv::LayerPlan> plans,
                                  std::span<const kv::LayerCalibration> tables) {
  KVX_ASSIGN_OR_RETURN(
      const std::vector<kv::LayerTables> transforms,
      tune::transforms_of(geometry(), plans, tables, setup_.block_size, setup_.context));
  KVX_ASSIGN_OR_RETURN(tune::Statistics transformed, runner::make_statistics(model_.config()));
  KVX_ASSIGN_OR_RETURN(const auto base, make_base_cache(model_, engine_, setup_));
  runner::CollectingAttention collecting(*base, transformed, engine_.context, transforms,
                                         setup_.block_size);
  KVX_RETURN_IF_ERROR(run_prompts(collecting, *base, "collecting scales"));
  transformed_ = std::move(transformed);
  transformed_of_ = candidate;
  return {};
}

Status Tuner::fit_scales(const Candidate& candidate, std::span<const kv::LayerPlan> plans,
                         std::vector<kv::LayerCalibration>& tables) {
  Candidate without_scales = candidate;
  without_scales.fit.tensor_scales = tune::TensorScaleRule::kNone;
  without_scales.fit.given_scales = false;
  without_scales.fit.percentile = 100;
  if (!transformed_ || !(transformed_of_ == without_scales)) {
    KVX_RETURN_IF_ERROR(collect_transformed(without_scales, plans, tables));
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    KVX_RETURN_IF_ERROR(
        tune::fit_scales(*transformed_, static_cast<int>(i), candidate.fit, plans[i], tables[i]));
  }
  return {};
}

Result<runner::KvAttentionOptions> Tuner::fit(const Candidate& candidate) {
  KVX_ASSIGN_OR_RETURN(ReadCandidate read, read_candidate(candidate));
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::LayerPlan> plans,
                       kv::plan_layers(geometry(), read.recipe, read.overrides));
  runner::KvAttentionOptions cache;
  cache.block_size = setup_.block_size;
  cache.max_tokens = setup_.context;
  cache.on_gpu = setup_.on_gpu;
  for (size_t i = 0; i < plans.size(); ++i) {
    KVX_ASSIGN_OR_RETURN(
        kv::LayerCalibration tables,
        tune::fit_tables(*statistics_, static_cast<int>(i), candidate.fit, plans[i]));
    cache.calibration.push_back(std::move(tables));
  }
  if (candidate.fit.has_scales()) {
    KVX_RETURN_IF_ERROR(fit_scales(candidate, plans, cache.calibration));
  }
  cache.recipe = std::move(read.recipe);
  cache.overrides = std::move(read.overrides);
  return cache;
}

Result<quality::CacheQuality> Tuner::select(const Candidate& candidate) {
  KVX_ASSIGN_OR_RETURN(const runner::KvAttentionOptions cache, fit(candidate));
  return selection_.judge(cache);
}

Result<quality::CacheQuality> Tuner::verify(const Candidate& candidate) {
  KVX_ASSIGN_OR_RETURN(const runner::KvAttentionOptions cache, fit(candidate));
  return verification_.judge(cache);
}

Result<Candidate> Tuner::choose_options(const std::string& recipe, double percentile,
                                        std::vector<TriedOption>& tried) {
  KVX_ASSIGN_OR_RETURN(Candidate best, untuned(recipe));
  const std::vector<TuningOption> options = options_of(percentile);
  work_.plan(static_cast<double>(selection_.num_tokens()) *
             static_cast<double>(2 + options.size()));
  work_.begin(recipe);
  KVX_ASSIGN_OR_RETURN(const quality::CacheQuality plain, select(best));
  tried.push_back({recipe, plain.kl(), plain.change_percent(), true});
  double least = plain.kl().value;
  for (const TuningOption& option : options) {
    Candidate candidate = best;
    KVX_ASSIGN_OR_RETURN(const bool applies, option.add(candidate));
    if (!applies) continue;
    work_.begin(recipe + " with " + option.name);
    KVX_ASSIGN_OR_RETURN(const quality::CacheQuality quality, select(candidate));
    const double kl = quality.kl().value;
    tried.push_back(
        {option.name, quality.kl(), quality.change_percent(), kl < kWorthwhile * least});
    if (!tried.back().is_kept) continue;
    best = std::move(candidate);
    least = kl;
  }
  return best;
}

}  // namespace kvx::tool
