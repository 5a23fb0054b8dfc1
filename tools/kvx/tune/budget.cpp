// The search: errors of all formats in every layer and head from one pass, then real runs that
// correct what the errors predict.
#include "tools/kvx/tune/budget.hpp"

#include <limits>

#include "tools/kvx/compare/window_scores.hpp"
#include "tools/kvx/tune/judge.hpp"
#include "tools/kvx/tune/proxy_attention.hpp"

namespace kvx::tool {
namespace {

constexpr int kMostRuns = 8;      // real runs on the selection windows
constexpr int kMostVerified = 3;  // and on the verification windows
constexpr double kMargin = 0.9;   // of the limit that a prediction may use

}  // namespace

// One pass with a cache for each format and side; the other side is in 16 bits.
Status Budget::measure(const Candidate& cheapest, SideLadder& k, SideLadder& v) {
  const int num_layers = model_.config().num_layers;
  std::vector<std::unique_ptr<runner::KvAttention>> caches;
  std::vector<FormatError*> measured;
  for (SideLadder* side : {&k, &v}) {
    for (FormatError& format : side->formats) {
      format.errors.assign(static_cast<size_t>(num_layers) * num_parts_, 0.0);
      if (format.bits >= 16) continue;  // as the base
      Candidate candidate = cheapest;
      const KvFormats formats =
          side == &k ? KvFormats{format.format, "bf16"} : KvFormats{"bf16", format.format};
      for (int layer = 0; layer < num_layers; ++layer) candidate.layers[layer] = {formats};
      KVX_ASSIGN_OR_RETURN(const runner::KvAttentionOptions options, tuner_.fit(candidate));
      KVX_ASSIGN_OR_RETURN(
          auto cache, runner::KvAttention::create(model_.config(), options, *engine_.executor));
      caches.push_back(std::move(cache));
      measured.push_back(&format);
    }
  }
  KVX_ASSIGN_OR_RETURN(auto base, make_base_cache(model_, engine_, setup_));
  std::vector<runner::AttentionBackend*> backends;
  for (const auto& cache : caches) backends.push_back(cache.get());
  ProxyAttention proxy(model_, *base, backends, num_parts_, first_scored(setup_.context));
  // Caches cost about a third of a pass each: counted as that.
  work_.begin("measuring layers");
  KVX_RETURN_IF_ERROR(model_.forward(corpus_.selection.front(), proxy, nullptr));
  work_.advance(setup_.context);
  for (size_t c = 0; c < measured.size(); ++c) measured[c]->errors = proxy.errors(c);
  return {};
}

Candidate Budget::planned(const Candidate& cheapest) const {
  Candidate candidate = cheapest;
  const kv::Recipe recipe = kv::parse_recipe(cheapest.recipe).value();
  const std::vector<KvFormats> of_recipe(num_parts_, formats_of(recipe));
  for (int layer = 0; layer < assignment_->num_layers(); ++layer) {
    std::vector<KvFormats> formats = assignment_->formats(layer);
    if (formats != of_recipe) candidate.layers[layer] = std::move(formats);
  }
  return candidate;
}

Result<Candidate> Budget::plan(const Candidate& cheapest, const Goal& goal) {
  KVX_ASSIGN_OR_RETURN(const kv::Recipe recipe, kv::parse_recipe(cheapest.recipe));
  const int head_dim = model_.config().head_dim;
  KVX_ASSIGN_OR_RETURN(SideLadder k, ladder_of(recipe, head_dim, setup_.block_size, true));
  KVX_ASSIGN_OR_RETURN(SideLadder v, ladder_of(recipe, head_dim, setup_.block_size, false));
  KVX_RETURN_IF_ERROR(measure(cheapest, k, v));
  assignment_.emplace(std::move(k), std::move(v), model_.config().num_layers, num_parts_);
  if (goal.kind == Goal::Kind::kBits) {
    while (assignment_->widen(goal.limit)) {
    }
    return planned(cheapest);
  }
  return widen_until_kept(cheapest, goal);
}

// What a real run measures, divided by the sum of all errors, corrects the next prediction.
Result<Candidate> Budget::widen_until_kept(const Candidate& cheapest, const Goal& goal) {
  constexpr double kAnyBits = std::numeric_limits<double>::infinity();
  int verified = 0;
  double target = goal.limit;
  for (int run = 0; run < kMostRuns; ++run) {
    const Candidate candidate = planned(cheapest);
    work_.begin(fmt::format("a plan of {:.2f} bits", assignment_->bits()));
    KVX_ASSIGN_OR_RETURN(const quality::CacheQuality chosen_on, tuner_.select(candidate));
    double measured = goal.measure(chosen_on);
    if (measured <= target) {
      KVX_ASSIGN_OR_RETURN(const quality::CacheQuality quality, tuner_.verify(candidate));
      if (goal.is_kept(quality) || ++verified == kMostVerified) return candidate;
      // The other text is harder: the same plan must do better here by as much.
      // Chance may put a change of perplexity below 0, of which no share can be asked for.
      measured = std::max(measured, 0.1 * target);
      target = std::min(target, measured) * goal.limit / goal.measure(quality);
    }
    const double factor = measured / assignment_->error();
    bool is_changed = false;
    while (factor * assignment_->error() > kMargin * target && assignment_->widen(kAnyBits)) {
      is_changed = true;
    }
    if (!is_changed) return candidate;
  }
  return planned(cheapest);
}

}  // namespace kvx::tool
