// The recipe parser: splits the string, applies each option to the sides that take it, and refuses
// what no side takes.
#include "kv/recipe.hpp"

#include <charconv>
#include <optional>

#include "format/list.hpp"

namespace kvx::kv {
namespace {

using format::FormatId;
using format::ScaleChoice;
using format::ScaleRule;
using format::ScaleSource;
using format::ScaleType;
using format::SpecOptions;

constexpr int kMaxTokens =
    1 << 24;  // of sink and recent: more than any context, small enough to add up

constexpr OptionHelp kOptions[] = {
    {"auto", "what docs/formats.md recommends for the format"},
    {"g32, g64, g128", "numbers that share a scale (int8, int4; default g64)"},
    {"scale=f16|bf16|f32",
     "how a scale is stored (int8, int4, *_row: f16, f32; affine: f16, bf16)"},
    {"source=computed|given|page",
     "who makes a scale: each row at append, a calibrated table, or a block together"},
    {"rule=ceil|floor", "how mxfp4 makes its power of two (ceil clips nothing; floor is OCP's)"},
    {"4over6", "scale by the better of amax/6 and amax/4 (E2M1 formats)"},
    {"search", "scale by the best of eight candidates, by squared error"},
    {"hadamard", "rotate before quantisation; q and the output are rotated to match"},
    {"sink=N", "keep the first N tokens in 16 bits (rounded up to whole blocks)"},
    {"recent=N",
     "keep at least the N tokens before every query in 16 bits (whole blocks and the open one)"},
    {"full_precision=bf16|f16|f32", "the format of sink and recent tokens (default bf16)"},
    {"immediate", "no full-precision window: every token is quantised when it is appended"},
    {"order=heads|turbomind",
     "how a block lies in memory: head by head, or as TurboMind's kernels read it"},
};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  size_t first = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && text[i] != separator) continue;
    parts.push_back(text.substr(first, i - first));
    first = i + 1;
  }
  return parts;
}

std::string format_names() {
  std::string names;
  for (const format::Facts* facts : format::kAllFacts) {
    names += (names.empty() ? "" : ", ") + std::string(facts->name);
  }
  return names;
}

Result<FormatId> parse_format(std::string_view name) {
  if (const std::optional<FormatId> id = format::format_named(name)) return *id;
  return invalid_argument("format is '{}'; expected one of {}", name, format_names());
}

Result<int> parse_number(std::string_view field, std::string_view text, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_whole = error == std::errc() && end == text.data() + text.size();
  if (is_whole && value >= low && value <= high) return value;
  return invalid_argument("{} is '{}'; expected a whole number from {} to {}", field, text, low,
                          high);
}

template <class Enum>
std::optional<Enum> named(std::string_view name, std::initializer_list<Enum> values) {
  for (Enum value : values) {
    if (name_of(value) == name) return value;
  }
  return std::nullopt;
}

// What follows "=" in an option; empty when there is no "=".
using OptionValue = std::optional<std::string_view>;

// One side while its options are being read.
struct SideDraft {
  FormatId id = FormatId::kBF16;
  SpecOptions options;
  bool hadamard = false;

  const format::Facts& facts() const { return format::facts_of(id); }
  bool chooses_scales() const {
    return facts().scale_types.preferred() != ScaleType::kNone &&
           facts().scale_rules.preferred() != ScaleRule::kAffine &&
           facts().scale_rules.preferred() != ScaleRule::kDual;
  }

  // Whether the option is one of this format's; remembers it if so.
  bool take(std::string_view word, OptionValue value);
  bool take_scale_choice(ScaleChoice choice);
};

bool SideDraft::take_scale_choice(ScaleChoice choice) {
  const bool fits = choice == ScaleChoice::k4Over6 ? facts().element == "E2M1" : chooses_scales();
  if (fits) options.scale_choice = choice;
  // A searched scale is a computed one: fp8's default, a given scale, gives way.
  if (fits && !options.scale_source) options.scale_source = ScaleSource::kComputed;
  return fits;
}

template <class T>
bool take_choice(const format::Choices<T>& allowed, std::optional<T> value,
                 std::optional<T>& slot) {
  if (!value || !allowed.allows(*value)) return false;
  slot = value;
  return true;
}

bool SideDraft::take(std::string_view word, OptionValue value) {
  if (word == "hadamard") return hadamard = true;
  if (word == "search") return take_scale_choice(ScaleChoice::kSearch);
  if (word == "4over6") return take_scale_choice(ScaleChoice::k4Over6);
  if (word == "scale") {
    return take_choice(facts().scale_types,
                       named(*value, {ScaleType::kF16, ScaleType::kBF16, ScaleType::kF32}),
                       options.scale_type);
  }
  if (word == "rule") {
    return take_choice(facts().scale_rules,
                       named(*value, {ScaleRule::kE8M0Ceil, ScaleRule::kE8M0Floor}),
                       options.scale_rule);
  }
  if (word == "source") {
    if (facts().scale_types.preferred() == ScaleType::kNone) return false;
    return take_choice(
        facts().scale_sources,
        named(*value, {ScaleSource::kComputed, ScaleSource::kGiven, ScaleSource::kPageShared}),
        options.scale_source);
  }
  for (int size : {32, 64, 128}) {
    if (word == fmt::format("g{}", size)) {
      return take_choice(facts().group_sizes, std::optional<int>(size), options.group_size);
    }
  }
  return false;
}

// The whole recipe while its options are being read.
struct Draft {
  SideDraft k;
  SideDraft v;
  std::optional<FormatId> rotary;
  std::optional<int> sink;
  std::optional<int> recent;
  FormatId full_precision = FormatId::kBF16;
  bool full_precision_is_named = false;
  bool immediate = false;
  cache::BlockOrder order = cache::BlockOrder::kHeads;

  Status apply(std::string_view option);
  Status apply_auto();
  Result<bool> apply_to_cache(std::string_view word, OptionValue value);
  bool apply_to_sides(std::string_view word, OptionValue value);
};

// Options of the cache as a whole. False: the word is not one of them.
Result<bool> Draft::apply_to_cache(std::string_view word, OptionValue value) {
  if (word == "sink") {
    KVX_ASSIGN_OR_RETURN(sink, parse_number("sink", value.value_or(""), 0, kMaxTokens));
  } else if (word == "recent") {
    KVX_ASSIGN_OR_RETURN(recent, parse_number("recent", value.value_or(""), 0, kMaxTokens));
  } else if (word == "full_precision") {
    KVX_ASSIGN_OR_RETURN(full_precision, parse_format(value.value_or("")));
    if (format::facts_of(full_precision).scale_types.preferred() != ScaleType::kNone) {
      return invalid_argument("full_precision is '{}'; expected bf16, f16 or f32", *value);
    }
    full_precision_is_named = true;
  } else if (word == "immediate" && !value) {
    immediate = true;
  } else if (word == "order") {
    using cache::BlockOrder;
    const auto named_order =
        named(value.value_or(""), {BlockOrder::kHeads, BlockOrder::kTurbomind});
    if (!named_order) {
      return invalid_argument("order is '{}'; expected heads or turbomind", value.value_or(""));
    }
    order = *named_order;
  } else {
    return false;
  }
  return true;
}

bool Draft::apply_to_sides(std::string_view word, OptionValue value) {
  const bool k_only = word.starts_with("k.");
  const bool v_only = word.starts_with("v.");
  if (k_only || v_only) word.remove_prefix(2);
  const bool wants_value = word == "scale" || word == "rule" || word == "source";
  if (wants_value == !value) return false;
  const bool k_takes_it = !v_only && k.take(word, value);
  const bool v_takes_it = !k_only && v.take(word, value);
  return k_takes_it || v_takes_it;
}

Status Draft::apply(std::string_view option) {
  if (option == "auto") return apply_auto();
  const size_t equals = option.find('=');
  const std::string_view word = option.substr(0, equals);
  const OptionValue value =
      equals == std::string_view::npos ? OptionValue() : option.substr(equals + 1);
  KVX_ASSIGN_OR_RETURN(const bool is_the_caches, apply_to_cache(word, value));
  if (is_the_caches || apply_to_sides(word, value)) return {};
  return invalid_argument(
      "option is '{}'; {}/{} takes no such option or value (see kvx formats --help)", option,
      k.facts().name, v.facts().name);
}

// Each side takes what its own format recommends.
Status Draft::apply_auto() {
  for (const bool is_k : {true, false}) {
    const std::string_view options = recommended_options(is_k ? k.id : v.id);
    if (options.empty()) continue;
    for (std::string_view option : split(options, ',')) {
      const bool names_a_side = option.starts_with("k.") || option.starts_with("v.");
      if (names_a_side && option.starts_with("k.") != is_k) continue;
      if (names_a_side) option.remove_prefix(2);
      const bool is_the_caches = option.find('=') != std::string_view::npos;
      KVX_RETURN_IF_ERROR(apply(is_the_caches ? std::string(option)
                                              : fmt::format("{}.{}", is_k ? 'k' : 'v', option)));
    }
  }
  return {};
}

Status finish_window(const Draft& draft, Recipe& recipe) {
  KVX_ASSIGN_OR_RETURN(recipe.full_precision_spec, format::make_spec(draft.full_precision));
  recipe.has_full_precision_window = (draft.sink || draft.recent) && !draft.immediate;
  recipe.sink_tokens = draft.sink.value_or(0);
  recipe.recent_tokens = draft.recent.value_or(0);
  if (draft.full_precision_is_named && !recipe.has_full_precision_window) {
    return invalid_argument("full_precision is '{}'; it needs sink=N or recent=N",
                            format::facts_of(draft.full_precision).name);
  }
  return {};
}

Result<Recipe> finish(const Draft& draft, std::string_view text) {
  Recipe recipe;
  recipe.text = text;
  KVX_ASSIGN_OR_RETURN(recipe.k.spec, format::make_spec(draft.k.id, draft.k.options));
  KVX_ASSIGN_OR_RETURN(recipe.v.spec, format::make_spec(draft.v.id, draft.v.options));
  recipe.k.hadamard = draft.k.hadamard;
  recipe.v.hadamard = draft.v.hadamard;
  recipe.order = draft.order;
  if (draft.rotary) {
    SpecOptions options;
    const bool has_scales =
        format::facts_of(*draft.rotary).scale_types.preferred() != ScaleType::kNone;
    if (has_scales) options.scale_source = ScaleSource::kComputed;  // tables have none for it
    KVX_ASSIGN_OR_RETURN(recipe.rotary, format::make_spec(*draft.rotary, options));
  }
  KVX_RETURN_IF_ERROR(finish_window(draft, recipe));
  return recipe;
}

Result<std::pair<std::string_view, Recipe>> split_override(std::string_view text) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) {
    return invalid_argument("override is '{}'; expected WHERE=RECIPE, such as 0,1=bf16", text);
  }
  KVX_ASSIGN_OR_RETURN(Recipe recipe, parse_recipe(text.substr(equals + 1)));
  if (recipe.has_full_precision_window) {
    return invalid_argument("override is '{}'; sink and recent belong to the whole cache", text);
  }
  if (recipe.order != cache::BlockOrder::kHeads) {
    return invalid_argument("override is '{}'; order belongs to the whole cache", text);
  }
  return std::pair(text.substr(0, equals), std::move(recipe));
}

constexpr int kMaxLayer = 1 << 16;

// What the window of a recipe was made from.
Draft window_draft(const Recipe& recipe) {
  Draft draft;
  if (!recipe.has_full_precision_window) return draft;
  draft.sink = recipe.sink_tokens;
  draft.recent = recipe.recent_tokens;
  draft.full_precision = recipe.full_precision_spec.facts->id;
  return draft;
}

}  // namespace

Result<Recipe> parse_recipe(std::string_view text) {
  if (text.starts_with("tuned:")) {
    return unsupported("recipe is '{}'; a tuned recipe cannot be used here", text);
  }
  const size_t colon = text.find(':');
  std::string_view formats = text.substr(0, colon);
  Draft draft;
  if (const size_t plus = formats.find('+'); plus != std::string_view::npos) {
    KVX_ASSIGN_OR_RETURN(draft.rotary, parse_format(formats.substr(plus + 1)));
    formats = formats.substr(0, plus);
  }
  const std::vector<std::string_view> sides = split(formats, '/');
  if (sides.size() > (draft.rotary ? 1 : 2)) {
    return invalid_argument(
        "recipe is '{}'; expected K or K/V before the options, or ROW+ROTARY of a latent cache",
        text);
  }
  KVX_ASSIGN_OR_RETURN(draft.k.id, parse_format(sides.front()));
  KVX_ASSIGN_OR_RETURN(draft.v.id, parse_format(sides.back()));
  if (colon != std::string_view::npos) {
    for (std::string_view option : split(text.substr(colon + 1), ',')) {
      KVX_RETURN_IF_ERROR(draft.apply(option));
    }
  }
  return finish(draft, text);
}

Status check_no_rotary(const Recipe& recipe) {
  if (!recipe.rotary) return {};
  return invalid_argument(
      "recipe is '{}'; a format behind '+' is of rotary numbers, which only a latent cache's rows "
      "have (leave it out)",
      recipe.text);
}

Result<Recipe> with_window_options(Recipe recipe, std::string_view options) {
  Draft draft = window_draft(recipe);
  for (std::string_view option : split(options, ',')) {
    const size_t equals = option.find('=');
    const OptionValue value =
        equals == std::string_view::npos ? OptionValue() : option.substr(equals + 1);
    if (value) draft.immediate = false;  // the later option wins
    KVX_ASSIGN_OR_RETURN(const bool is_taken,
                         draft.apply_to_cache(option.substr(0, equals), value));
    if (is_taken) continue;
    return invalid_argument(
        "option is '{}'; expected sink=N, recent=N, full_precision=FORMAT or immediate", option);
  }
  KVX_RETURN_IF_ERROR(finish_window(draft, recipe));
  return recipe;
}

Result<RecipeOverride> parse_layer_override(std::string_view text) {
  KVX_ASSIGN_OR_RETURN(auto parts, split_override(text));
  RecipeOverride result{{}, std::move(parts.second)};
  for (std::string_view range : split(parts.first, ',')) {
    const size_t dash = range.find('-');
    KVX_ASSIGN_OR_RETURN(const int first,
                         parse_number("layer", range.substr(0, dash), 0, kMaxLayer));
    int last = first;
    if (dash != std::string_view::npos) {
      KVX_ASSIGN_OR_RETURN(last, parse_number("layer", range.substr(dash + 1), first, kMaxLayer));
    }
    for (int layer = first; layer <= last; ++layer) result.where.push_back({layer, -1});
  }
  return result;
}

Result<RecipeOverride> parse_head_override(std::string_view text) {
  // The places hold colons too: only what follows "=" is a recipe.
  KVX_ASSIGN_OR_RETURN(auto parts, split_override(text));
  RecipeOverride result{{}, std::move(parts.second)};
  for (std::string_view place : split(parts.first, ',')) {
    const size_t colon = place.find(':');
    if (colon == std::string_view::npos) {
      return invalid_argument("head is '{}'; expected layer:head, such as 2:0", place);
    }
    KVX_ASSIGN_OR_RETURN(const int layer,
                         parse_number("layer", place.substr(0, colon), 0, kMaxLayer));
    KVX_ASSIGN_OR_RETURN(const int head,
                         parse_number("head", place.substr(colon + 1), 0, kMaxLayer));
    result.where.push_back({layer, head});
  }
  return result;
}

std::string_view name_of(cache::BlockOrder order) {
  return order == cache::BlockOrder::kTurbomind ? "turbomind" : "heads";
}

std::span<const OptionHelp> recipe_options() {
  return kOptions;
}

// The reasons are `kvx compare`'s figures; bench/log/ keeps them.
std::string_view recommended_options(FormatId id) {
  switch (id) {
    case FormatId::kF32:
    case FormatId::kF16:
    case FormatId::kBF16:
      return "";
    case FormatId::kNvfp4:
      return "k.hadamard,search,sink=16,recent=64";
    case FormatId::kMxfp4G16:
    case FormatId::kMxfp4:
    case FormatId::kFp4Row:
    case FormatId::kInt4Row:
      return "hadamard,search,sink=16,recent=64";
    case FormatId::kFp8E4M3:
    case FormatId::kFp8E5M2:
    case FormatId::kInt8:
    case FormatId::kInt4:
    case FormatId::kInt8Affine:
    case FormatId::kInt4Affine:
    case FormatId::kInt4Dual:
    case FormatId::kInt3Dual:
    case FormatId::kInt2Dual:
      return "hadamard,sink=16,recent=64";
  }
  return "";
}

}  // namespace kvx::kv
