// What the commands' parsers share.
#include "tools/kvx/command.hpp"

#include <charconv>

namespace kvx::tool {

CLI::Validator whole_number(int64_t low, int64_t high) {
  const auto check = [low, high](std::string& text) -> std::string {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool is_whole = error == std::errc() && end == text.data() + text.size();
    if (is_whole && value >= low && value <= high) return {};
    return fmt::format("is '{}'; expected a whole number from {} to {}", text, low, high);
  };
  return CLI::Validator(check, "N");
}

}  // namespace kvx::tool
