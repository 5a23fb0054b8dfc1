// json: reading JSON that may be hostile, without exceptions.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "core/result.hpp"

namespace kvx::tune {

inline constexpr int kMaxJsonDepth = 32;  // a recursive function must be able to follow

// INVALID_ARGUMENT, with `what` in front: the text is no JSON object, an object holds a name twice,
// or it is nested deeper than max_depth.
Result<nlohmann::json> parse_json_object(std::string_view what, std::string_view text,
                                         int max_depth = kMaxJsonDepth);

// Bytes that are not UTF-8 become U+FFFD.
std::string json_text(const nlohmann::json& value);

}  // namespace kvx::tune
