// The names of gates in one table, and the reader of their conditions.
#include "quality/gate.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

namespace kvx::quality {
namespace {

struct Kind {
  Figure figure;
  std::string_view name;
  char sign;  // the side of the limit on which a cache fails
  bool is_percent;
  std::string_view example;
  bool is_of_compare;
  bool is_of_stress;

  bool is_of(GateUse use) const { return use == GateUse::kCompare ? is_of_compare : is_of_stress; }
};

// In the order of the enumeration.
constexpr Kind kKinds[] = {
    {Figure::kPerplexityChange, "ppl", '>', true, "ppl>0.2%", true, false},
    {Figure::kKl, "kl", '>', false, "kl>0.01", true, false},
    {Figure::kSameTop, "top1", '<', true, "top1<99%", true, false},
    {Figure::kOutputCosine, "cosine", '<', false, "cosine<0.999", true, false},
    {Figure::kOutputError, "error", '>', false, "error>0.05", true, false},
    {Figure::kLogitCosine, "logit_cosine", '<', false, "logit_cosine<0.999", true, false},
    {Figure::kLogitError, "logit_error", '>', false, "logit_error>0.05", true, false},
    {Figure::kSaturated, "saturated", '>', false, "saturated>0", true, true},
    {Figure::kNonfinite, "nonfinite", '>', false, "nonfinite>0", true, true},
    {Figure::kPasskey, "passkey", '<', true, "passkey<90%", false, true},
    {Figure::kNeedles, "needles", '<', true, "needles<90%", false, true},
    {Figure::kEntities, "entities", '<', true, "entities<90%", false, true},
    {Figure::kAnswerNll, "nll", '>', false, "nll>0.05", false, true},
    {Figure::kDrift, "drift", '>', false, "drift>0.01", false, true},
};

const Kind& kind_of(Figure figure) {
  return kKinds[static_cast<int>(figure)];
}

std::string all_names(GateUse use) {
  std::string names;
  for (const Kind& kind : kKinds) {
    if (kind.is_of(use)) names += (names.empty() ? "" : ", ") + std::string(kind.name);
  }
  return names;
}

std::string_view without_blanks(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

Result<Gate> parse_gate(std::string_view text, GateUse use) {
  const size_t end = text.find_first_of("<>");
  const std::string_view name = without_blanks(text.substr(0, end));
  const auto kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                 [&](const Kind& k) { return k.is_of(use) && k.name == name; });
  if (kind == std::end(kKinds)) {
    return invalid_argument("fail_if has '{}'; expected a condition on one of {}, such as {}", text,
                            all_names(use), use == GateUse::kCompare ? "kl>0.01" : "drift>0.01");
  }
  if (end == std::string_view::npos || text[end] != kind->sign) {
    return invalid_argument("fail_if has '{}'; expected '{}' behind {}, as in {}", text, kind->sign,
                            kind->name, kind->example);
  }
  std::string_view number = without_blanks(text.substr(end + 1));
  const bool has_percent = !number.empty() && number.back() == '%';
  if (has_percent) number.remove_suffix(1);
  double limit = 0;
  const auto [rest, problem] = std::from_chars(number.data(), number.data() + number.size(), limit);
  const bool is_number = problem == std::errc() && rest == number.data() + number.size();
  if (!is_number || !std::isfinite(limit) || has_percent != kind->is_percent) {
    return invalid_argument("fail_if has '{}'; expected a {} behind '{}', as in {}", text,
                            kind->is_percent ? "percentage" : "number", kind->sign, kind->example);
  }
  return Gate{kind->figure, limit, std::string(text)};
}

}  // namespace

std::string_view name_of(Figure figure) {
  return kind_of(figure).name;
}

bool Gate::is_percent() const {
  return kind_of(figure).is_percent;
}

bool Gate::fails(double value) const {
  return kind_of(figure).sign == '>' ? !(value <= limit) : !(value >= limit);
}

Result<std::vector<Gate>> parse_gates(std::string_view text, GateUse use) {
  std::vector<Gate> gates;
  for (size_t first = 0; first <= text.size();) {
    const size_t comma = std::min(text.find(',', first), text.size());
    KVX_ASSIGN_OR_RETURN(Gate gate,
                         parse_gate(without_blanks(text.substr(first, comma - first)), use));
    const bool is_twice = std::any_of(gates.begin(), gates.end(),
                                      [&](const Gate& g) { return g.figure == gate.figure; });
    if (is_twice) {
      return invalid_argument("fail_if has {} twice; expected each once", name_of(gate.figure));
    }
    gates.push_back(std::move(gate));
    first = comma + 1;
  }
  return gates;
}

bool need_logits(const std::vector<Gate>& gates) {
  return std::any_of(gates.begin(), gates.end(), [](const Gate& gate) {
    return gate.figure == Figure::kLogitCosine || gate.figure == Figure::kLogitError;
  });
}

}  // namespace kvx::quality
