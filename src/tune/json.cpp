// parse_json_object: nlohmann's parser with a callback that sees names and depth.
#include "tune/json.hpp"

#include <set>
#include <vector>

namespace kvx::tune {
namespace {
using nlohmann::json;
}  // namespace

Result<json> parse_json_object(std::string_view what, std::string_view text, int max_depth) {
  std::vector<std::set<std::string>> names;  // of the open objects
  std::string twice;
  bool is_too_deep = false;
  const auto look = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth >= max_depth) is_too_deep = true;
    if (event == json::parse_event_t::object_start) names.emplace_back();
    if (event == json::parse_event_t::object_end) names.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& name = parsed.get_ref<const std::string&>();
      if (!names.back().insert(name).second) twice = name;
    }
    return !is_too_deep;
  };
  json value = json::parse(text, look, /*allow_exceptions=*/false);
  if (is_too_deep) return invalid_argument("{} is nested deeper than {}", what, max_depth);
  if (value.is_discarded()) return invalid_argument("{} is no JSON", what);
  if (!value.is_object()) return invalid_argument("{} is no JSON object", what);
  if (!twice.empty()) return invalid_argument("{} holds '{}' twice", what, twice);
  return value;
}

std::string json_text(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace kvx::tune
