// The search: errors of all formats in every layer from one pass, then real runs that correct what
// the errors predict.
#include "tools/kvx/tune/budget.hpp"

#include <charconv>
#include <cmath>
#include <limits>

#include "format/list.hpp"
#include "tools/kvx/compare/window_scores.hpp"
#include "tools/kvx/tune/judge.hpp"
#include "tools/kvx/tune/proxy_attention.hpp"

namespace kvx::tool {
namespace {

constexpr int kMostRuns = 8;      // real runs on the selection windows
constexpr int kMostVerified = 3;  // and on the verification windows
constexpr double kMargin = 0.9;   // of the limit that a prediction may use

// What a layer may be widened to, where its recipe has fewer bits. 8-bit floats lose more than int8
// in as many bits.
constexpr const char* kWider[] = {"int3_dual", "int4", "int4_dual", "nvfp4", "int8", "bf16"};

// Whether blocks of this format fit a cache of the recipe.
bool can_hold(const kv::Recipe& recipe, const format::FormatSpec& spec, int head_dim,
              int block_size) {
  if (!format::check_head_dim(spec, head_dim).ok()) return false;
  if (!spec.is_dual()) return true;
  return recipe.has_full_precision_window && format::check_block_size(spec, block_size).ok();
}

Result<format::FormatSpec> spec_named(const std::string& name) {
  KVX_ASSIGN_OR_RETURN(const kv::Recipe recipe, kv::parse_recipe(name));
  return recipe.k.spec;
}

std::optional<double> positive_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return std::isfinite(value) && value > 0 ? std::optional(value) : std::nullopt;
}

}  // namespace

double Goal::measure(const quality::CacheQuality& quality) const {
  if (kind == Kind::kKl) return quality.kl().value;
  if (kind == Kind::kPerplexity) return quality.change_percent().value;
  return std::numeric_limits<double>::quiet_NaN();
}

bool Goal::is_kept(const quality::CacheQuality& quality) const {
  return kind == Kind::kNone || kind == Kind::kBits || measure(quality) <= limit;
}

std::string Goal::text() const {
  switch (kind) {
    case Kind::kNone:
      return "";
    case Kind::kKl:
      return fmt::format("kl={}", limit);
    case Kind::kPerplexity:
      return fmt::format("ppl={}%", limit);
    case Kind::kBits:
      return fmt::format("bits={}", limit);
  }
  return "";
}

Result<Goal> parse_goal(const std::string& budget, double bits) {
  if (!budget.empty() && bits > 0) {
    return invalid_argument("budget is '{}' and bits is {}; expected one of the two", budget, bits);
  }
  if (bits > 0) return Goal{Goal::Kind::kBits, bits};
  if (budget.empty()) return Goal{};
  std::string_view text = budget;
  Goal goal;
  if (text.starts_with("kl=")) {
    goal.kind = Goal::Kind::kKl;
    text.remove_prefix(3);
  } else if (text.starts_with("ppl=") && text.ends_with('%')) {
    goal.kind = Goal::Kind::kPerplexity;
    text.remove_prefix(4);
    text.remove_suffix(1);
  }
  const std::optional<double> limit = positive_number(text);
  if (goal.kind == Goal::Kind::kNone || !limit) {
    return invalid_argument(
        "budget is '{}'; expected kl=NATS or ppl=PERCENT%, a positive number, as kl=0.01", budget);
  }
  goal.limit = *limit;
  return goal;
}

Result<SideLadder> ladder_of(const kv::Recipe& recipe, int head_dim, int block_size, bool is_k) {
  const kv::SideRecipe& side = is_k ? recipe.k : recipe.v;
  SideLadder ladder;
  ladder.formats.push_back({std::string(side.spec.facts->name),
                            format::bits_per_value(side.spec, head_dim, block_size),
                            {}});
  for (const char* name : kWider) {
    KVX_ASSIGN_OR_RETURN(const format::FormatSpec spec, spec_named(name));
    const double bits = format::bits_per_value(spec, head_dim, block_size);
    if (can_hold(recipe, spec, head_dim, block_size) && bits > ladder.formats.back().bits) {
      ladder.formats.push_back({name, bits, {}});
    }
  }
  return ladder;
}

struct Assignment::Step {
  int side;
  int layer;
  int format;
  double gain;  // error a bit
};

Assignment::Assignment(SideLadder k, SideLadder v, int num_layers)
    : sides_{std::move(k), std::move(v)},
      formats_{std::vector<int>(num_layers), std::vector<int>(num_layers)} {}

LayerFormats Assignment::formats(int layer) const {
  return {sides_[0].formats[formats_[0][layer]].format,
          sides_[1].formats[formats_[1][layer]].format};
}

double Assignment::bits(int layer) const {
  return (sides_[0].formats[formats_[0][layer]].bits + sides_[1].formats[formats_[1][layer]].bits) /
         2;
}

double Assignment::error(int layer, bool is_k) const {
  const int side = is_k ? 0 : 1;
  return sides_[side].formats[formats_[side][layer]].errors[layer];
}

double Assignment::bits() const {
  double sum = 0;
  const int num_layers = static_cast<int>(formats_[0].size());
  for (int i = 0; i < num_layers; ++i) sum += bits(i);
  return sum / num_layers;
}

double Assignment::error() const {
  double sum = 0;
  const int num_layers = static_cast<int>(formats_[0].size());
  for (int i = 0; i < num_layers; ++i) sum += error(i, true) + error(i, false);
  return sum;
}

std::optional<Assignment::Step> Assignment::best_step(double most_bits) const {
  const int num_layers = static_cast<int>(formats_[0].size());
  const double room = (most_bits - bits()) * 2 * num_layers + 1e-9;
  std::optional<Step> best;
  for (int side = 0; side < 2; ++side) {
    const std::vector<FormatError>& ladder = sides_[side].formats;
    for (int layer = 0; layer < num_layers; ++layer) {
      const FormatError& now = ladder[formats_[side][layer]];
      for (int f = formats_[side][layer] + 1; f < static_cast<int>(ladder.size()); ++f) {
        const double more_bits = ladder[f].bits - now.bits;
        if (more_bits > room) break;
        const double gain = (now.errors[layer] - ladder[f].errors[layer]) / more_bits;
        if (!best || gain > best->gain) best = Step{side, layer, f, gain};
      }
    }
  }
  return best;
}

bool Assignment::widen(double most_bits) {
  const std::optional<Step> step = best_step(most_bits);
  if (!step) return false;
  formats_[step->side][step->layer] = step->format;
  return true;
}

// One pass with a cache for each format and side; the other side is in 16 bits.
Status Budget::measure(const Candidate& cheapest, SideLadder& k, SideLadder& v) {
  const int num_layers = model_.config().num_layers;
  std::vector<std::unique_ptr<runner::KvAttention>> caches;
  std::vector<FormatError*> measured;
  for (SideLadder* side : {&k, &v}) {
    for (FormatError& format : side->formats) {
      format.errors.assign(num_layers, 0.0);
      if (format.bits >= 16) continue;  // as the base
      Candidate candidate = cheapest;
      for (int layer = 0; layer < num_layers; ++layer) {
        candidate.layers[layer] =
            side == &k ? LayerFormats{format.format, "bf16"} : LayerFormats{"bf16", format.format};
      }
      KVX_ASSIGN_OR_RETURN(const runner::KvAttentionOptions options, tuner_.fit(candidate));
      KVX_ASSIGN_OR_RETURN(
          auto cache, runner::KvAttention::create(model_.config(), options, *engine_.executor));
      caches.push_back(std::move(cache));
      measured.push_back(&format);
    }
  }
  KVX_ASSIGN_OR_RETURN(auto base, make_base_cache(model_, engine_, block_size_, context_));
  std::vector<runner::AttentionBackend*> backends;
  for (const auto& cache : caches) backends.push_back(cache.get());
  ProxyAttention proxy(model_, *base, backends, first_scored(context_));
  // Caches cost about a third of a pass each: counted as that.
  work_.begin("measuring layers");
  KVX_RETURN_IF_ERROR(model_.forward(corpus_.selection.front(), proxy, nullptr));
  work_.advance(context_);
  for (size_t c = 0; c < measured.size(); ++c) measured[c]->errors = proxy.errors(c);
  return {};
}

Candidate Budget::planned(const Candidate& cheapest) const {
  Candidate candidate = cheapest;
  const int num_layers = model_.config().num_layers;
  Result<kv::Recipe> recipe = kv::parse_recipe(cheapest.recipe);
  for (int layer = 0; layer < num_layers; ++layer) {
    const LayerFormats formats = assignment_->formats(layer);
    if (!(formats == formats_of(recipe.value()))) candidate.layers[layer] = formats;
  }
  return candidate;
}

Result<Candidate> Budget::plan(const Candidate& cheapest, const Goal& goal) {
  KVX_ASSIGN_OR_RETURN(const kv::Recipe recipe, kv::parse_recipe(cheapest.recipe));
  const int head_dim = model_.config().head_dim;
  KVX_ASSIGN_OR_RETURN(SideLadder k, ladder_of(recipe, head_dim, block_size_, true));
  KVX_ASSIGN_OR_RETURN(SideLadder v, ladder_of(recipe, head_dim, block_size_, false));
  KVX_RETURN_IF_ERROR(measure(cheapest, k, v));
  assignment_.emplace(std::move(k), std::move(v), model_.config().num_layers);
  if (goal.kind == Goal::Kind::kBits) {
    while (assignment_->widen(goal.limit)) {
    }
    return planned(cheapest);
  }
  return widen_until_kept(cheapest, goal);
}

// What a real run measures, divided by the sum of the layers' errors, corrects the next prediction.
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
