// parse_tiers: name(argument, key=value, ...), ... to TierConfigs.
#include "tier/chain/tier_config.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "cache/pool/memory_budget.hpp"

namespace kvx::tier {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"host", "disk", "folder", "redis", "store"};

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n";
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) + 1 - first);
}

// A tier's text, cut: what stands before the parenthesis and what stands between its commas.
// Quotes ("...") keep commas and parentheses of a path together.
struct TierText {
  std::string_view whole;
  std::string_view name;
  std::vector<std::string> arguments;
};

Error malformed(std::string_view text) {
  return invalid_argument(
      "tiers has '{}'; expected tiers as host(8GiB) or disk(/folder, 200GiB), separated by commas",
      text);
}

// The first tier of `rest`, which is moved behind it.
Result<TierText> take_tier(std::string_view& rest) {
  TierText tier;
  const std::string_view from = rest;
  const size_t open = rest.find('(');
  if (open == std::string_view::npos) return malformed(trimmed(from));
  tier.name = trimmed(rest.substr(0, open));
  tier.arguments.emplace_back();
  bool is_quoted = false;
  size_t at = open + 1;
  for (; at < rest.size(); ++at) {
    const char c = rest[at];
    if (c == '"') {
      is_quoted = !is_quoted;
    } else if (!is_quoted && c == ')') {
      break;
    } else if (!is_quoted && c == ',') {
      tier.arguments.emplace_back();
    } else {
      tier.arguments.back() += c;
    }
  }
  if (at == rest.size()) return malformed(trimmed(from));
  tier.whole = trimmed(rest.substr(0, at + 1));
  rest = trimmed(rest.substr(at + 1));
  if (rest.empty()) return tier;
  if (rest.front() != ',' || trimmed(rest.substr(1)).empty()) return malformed(trimmed(from));
  rest = trimmed(rest.substr(1));
  return tier;
}

// The arguments of one tier, as they are read.
class Arguments {
 public:
  explicit Arguments(const TierText& text) : text_(text) {
    for (const std::string& one : text.arguments) {
      const std::string argument(trimmed(one));
      const size_t equals = argument.find('=');
      const std::string_view key = std::string_view(argument).substr(0, equals);
      const bool is_named =
          equals != std::string::npos && !key.empty() &&
          key.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") == std::string_view::npos;
      (is_named ? named_ : positional_).push_back(argument);
    }
    if (positional_.size() == 1 && positional_[0].empty()) positional_.clear();
  }

  // In order, all of them.
  Status expect(size_t count, std::string_view usage) const {
    const bool has_all =
        positional_.size() == count && std::ranges::none_of(positional_, &std::string::empty);
    if (has_all) return {};
    return invalid_argument("tiers has '{}'; expected {}", text_.whole, usage);
  }
  const std::string& operator[](size_t i) const { return positional_[i]; }

  std::optional<std::string> take(std::string_view key) {
    const auto found = std::ranges::find_if(named_, [key](const std::string& one) {
      return one.size() > key.size() && one.starts_with(key) && one[key.size()] == '=';
    });
    if (found == named_.end()) return std::nullopt;
    std::string value = found->substr(key.size() + 1);
    named_.erase(found);
    return value;
  }
  // Nothing may be left that nobody took.
  Status check_all_taken(std::string_view usage) const {
    if (named_.empty()) return {};
    return invalid_argument("tiers has '{}' in '{}'; expected {}", named_.front(), text_.whole,
                            usage);
  }

 private:
  const TierText& text_;
  std::vector<std::string> positional_;
  std::vector<std::string> named_;
};

Result<int64_t> parse_bytes(std::string_view text, std::string_view whole) {
  const auto budget = cache::parse_memory_budget(text);
  if (budget.ok()) {
    if (const auto* bytes = std::get_if<cache::BudgetBytes>(&budget.value())) return bytes->bytes;
  }
  return invalid_argument("tiers has the size '{}' in '{}'; expected bytes with a unit, as 8GiB",
                          text, whole);
}

// "200ms", "30s", "5m", "2h", "1d" in milliseconds.
Result<int64_t> parse_duration(std::string_view key, std::string_view text) {
  constexpr std::pair<std::string_view, int64_t> kUnits[] = {
      {"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3'600'000}, {"d", 86'400'000}};
  for (const auto& [unit, milliseconds] : kUnits) {
    if (!text.ends_with(unit)) continue;
    const std::string_view digits = text.substr(0, text.size() - unit.size());
    int64_t count = 0;
    const auto [end, problem] =
        std::from_chars(digits.data(), digits.data() + digits.size(), count);
    const bool is_whole = problem == std::errc() && end == digits.data() + digits.size();
    constexpr int64_t kMostMilliseconds = int64_t{10} * 365 * 86'400'000;
    if (is_whole && count >= 1 && count <= kMostMilliseconds / milliseconds) {
      return count * milliseconds;
    }
    break;
  }
  return invalid_argument("tiers has {}={}; expected a time as 200ms, 30s, 5m, 2h or 1d", key,
                          text);
}

Status take_duration(Arguments& arguments, std::string_view key, int64_t& milliseconds) {
  const std::optional<std::string> text = arguments.take(key);
  if (!text) return {};
  KVX_ASSIGN_OR_RETURN(milliseconds, parse_duration(key, *text));
  return {};
}

Status take_store_options(Arguments& arguments, TierConfig& config) {
  config.key_env = arguments.take("key_env").value_or("");
  KVX_RETURN_IF_ERROR(take_duration(arguments, "timeout", config.timeout_ms));
  if (config.kind != TierKind::kRedis) return {};
  config.password_env = arguments.take("password_env").value_or("");
  config.ca_file = arguments.take("ca").value_or("");
  return take_duration(arguments, "ttl", config.ttl_ms);
}

Status take_policy(Arguments& arguments, TierConfig& config) {
  const std::optional<std::string> policy = arguments.take("policy");
  if (!policy) return {};
  const auto kind = cache::eviction_named(*policy);
  if (!kind) return invalid_argument("tiers has policy={}; expected lru, lfu or 2q", *policy);
  config.eviction = *kind;
  return {};
}

Result<TierConfig> read_tier(const TierText& text) {
  TierConfig config;
  Arguments arguments(text);
  std::string_view usage;
  if (text.name == "host") {
    usage = "host(BYTES) with policy=lru|lfu|2q if wanted";
    KVX_RETURN_IF_ERROR(arguments.expect(1, usage));
    KVX_ASSIGN_OR_RETURN(config.budget_bytes, parse_bytes(arguments[0], text.whole));
  } else if (text.name == "disk") {
    usage = "disk(FOLDER, BYTES) with policy=lru|lfu|2q if wanted";
    config.kind = TierKind::kDisk;
    KVX_RETURN_IF_ERROR(arguments.expect(2, usage));
    config.folder = arguments[0];
    KVX_ASSIGN_OR_RETURN(config.budget_bytes, parse_bytes(arguments[1], text.whole));
  } else if (text.name == "folder") {
    usage = "folder(FOLDER) with timeout= and key_env= if wanted";
    config.kind = TierKind::kFolder;
    KVX_RETURN_IF_ERROR(arguments.expect(1, usage));
    config.folder = arguments[0];
  } else if (text.name == "redis") {
    usage = "redis(URL) with ttl=, timeout=, key_env=, password_env= and ca= if wanted";
    config.kind = TierKind::kRedis;
    KVX_RETURN_IF_ERROR(arguments.expect(1, usage));
    config.url = arguments[0];
  } else if (text.name == "store") {
    usage = "store(NAME) with timeout= and key_env= if wanted";
    config.kind = TierKind::kCaller;
    KVX_RETURN_IF_ERROR(arguments.expect(1, usage));
    config.store = arguments[0];
  } else {
    return invalid_argument("tiers has a tier '{}'; expected {}", text.name,
                            fmt::join(kNames, ", "));
  }
  KVX_RETURN_IF_ERROR(is_store(config.kind) ? take_store_options(arguments, config)
                                            : take_policy(arguments, config));
  KVX_RETURN_IF_ERROR(arguments.check_all_taken(usage));
  return config;
}

}  // namespace

std::string_view name_of(TierKind kind) {
  return kNames[static_cast<size_t>(kind)];
}

Result<std::vector<TierConfig>> parse_tiers(std::string_view text) {
  std::vector<TierConfig> tiers;
  std::string_view rest = trimmed(text);
  while (!rest.empty()) {
    KVX_ASSIGN_OR_RETURN(const TierText one, take_tier(rest));
    KVX_ASSIGN_OR_RETURN(TierConfig config, read_tier(one));
    tiers.push_back(std::move(config));
  }
  return tiers;
}

}  // namespace kvx::tier
