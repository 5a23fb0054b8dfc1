// The greedy step: of all that can be widened, what loses the most error a bit.
#include "tools/kvx/tune/assignment.hpp"

#include "format/list.hpp"

namespace kvx::tool {
namespace {

// What a side may be widened to, where its recipe has fewer bits. 8-bit floats lose more than int8
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

}  // namespace

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
  int place;
  int format;
  double gain;  // error a bit
};

Assignment::Assignment(SideLadder k, SideLadder v, int num_layers, int num_parts)
    : ladders_{std::move(k), std::move(v)}, num_layers_(num_layers), num_parts_(num_parts) {
  for (std::vector<int>& formats : formats_) {
    formats.assign(static_cast<size_t>(num_layers) * num_parts, 0);
  }
}

const FormatError& Assignment::format(CacheSide side, int layer, int part) const {
  const int s = static_cast<int>(side);
  return ladders_[s].formats[formats_[s][place_of(layer, part)]];
}

double Assignment::error(CacheSide side, int layer, int part) const {
  return format(side, layer, part).errors[place_of(layer, part)];
}

std::vector<KvFormats> Assignment::formats(int layer) const {
  std::vector<KvFormats> formats;
  for (int part = 0; part < num_parts_; ++part) {
    formats.push_back({format(CacheSide::kK, layer, part).format,  //
                       format(CacheSide::kV, layer, part).format});
  }
  return formats;
}

double Assignment::bits(int layer) const {
  double sum = 0;
  for (int part = 0; part < num_parts_; ++part) {
    sum += format(CacheSide::kK, layer, part).bits + format(CacheSide::kV, layer, part).bits;
  }
  return sum / (2 * num_parts_);
}

double Assignment::error(CacheSide side, int layer) const {
  double sum = 0;
  for (int part = 0; part < num_parts_; ++part) sum += error(side, layer, part);
  return sum;
}

double Assignment::bits() const {
  double sum = 0;
  for (int layer = 0; layer < num_layers_; ++layer) sum += bits(layer);
  return sum / num_layers_;
}

double Assignment::error() const {
  double sum = 0;
  for (int layer = 0; layer < num_layers_; ++layer) {
    sum += error(CacheSide::kK, layer) + error(CacheSide::kV, layer);
  }
  return sum;
}

std::optional<Assignment::Step> Assignment::best_step(double most_bits) const {
  const int num_places = num_layers_ * num_parts_;
  const double room = (most_bits - bits()) * 2 * num_places + 1e-9;
  std::optional<Step> best;
  for (int side = 0; side < 2; ++side) {
    const std::vector<FormatError>& ladder = ladders_[side].formats;
    for (int place = 0; place < num_places; ++place) {
      const FormatError& now = ladder[formats_[side][place]];
      for (int f = formats_[side][place] + 1; f < static_cast<int>(ladder.size()); ++f) {
        const double more_bits = ladder[f].bits - now.bits;
        if (more_bits > room) break;
        const double gain = (now.errors[place] - ladder[f].errors[place]) / more_bits;
        if (!best || gain > best->gain) best = Step{side, place, f, gain};
      }
    }
  }
  return best;
}

bool Assignment::widen(double most_bits) {
  const std::optional<Step> step = best_step(most_bits);
  if (!step) return false;
  formats_[step->side][step->place] = step->format;
  return true;
}

}  // namespace kvx::tool
