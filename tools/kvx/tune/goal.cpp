// Goals as texts, and whether what was judged keeps them.
#include "tools/kvx/tune/goal.hpp"

#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>

namespace kvx::tool {
namespace {

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

}  // namespace kvx::tool
