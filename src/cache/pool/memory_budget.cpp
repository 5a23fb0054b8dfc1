// MemoryBudget: text to a budget, and a budget to bytes.
#include "cache/pool/memory_budget.hpp"

#include <array>
#include <charconv>
#include <optional>

#include "core/checked.hpp"

namespace kvx::cache {
namespace {

struct Unit {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<Unit, 5> kUnits = {
    {{"TiB", int64_t{1} << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}};

Error bad_budget(std::string_view text) {
  return invalid_argument(
      "memory budget is '{}'; expected bytes (4GiB), blocks (1000) or a ratio above 0 up to 1 "
      "(0.8)",
      text);
}

// The whole of text, or nothing.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace

Result<MemoryBudget> parse_memory_budget(std::string_view text) {
  for (const Unit& unit : kUnits) {
    if (!text.ends_with(unit.name)) continue;
    const auto count = parse_number<int64_t>(text.substr(0, text.size() - unit.name.size()));
    if (!count || *count < 1) return bad_budget(text);
    const auto bytes = (CheckedSize(*count) * unit.bytes).get();
    if (!bytes) return bad_budget(text);
    return MemoryBudget(BudgetBytes{*bytes});
  }
  if (text.find('.') != std::string_view::npos) {
    const auto ratio = parse_number<double>(text);
    if (!ratio || !(*ratio > 0) || *ratio > 1) return bad_budget(text);
    return MemoryBudget(BudgetRatio{*ratio});
  }
  const auto num_blocks = parse_number<int64_t>(text);
  if (!num_blocks || *num_blocks < 1) return bad_budget(text);
  return MemoryBudget(BudgetBlocks{*num_blocks});
}

Result<int64_t> resolve_budget(const MemoryBudget& budget, int64_t available_bytes,
                               int64_t block_bytes) {
  int64_t bytes = 0;
  if (const auto* given = std::get_if<BudgetBytes>(&budget)) {
    bytes = given->bytes;
  } else if (const auto* blocks = std::get_if<BudgetBlocks>(&budget)) {
    bytes = mul_div(blocks->num_blocks, block_bytes, 1);
  } else {
    bytes = static_cast<int64_t>(std::get<BudgetRatio>(budget).ratio *
                                 static_cast<double>(available_bytes));
  }
  if (bytes >= block_bytes) return bytes;
  return out_of_range("the memory budget is {} bytes; one block needs {}", bytes, block_bytes);
}

}  // namespace kvx::cache
