// A report's page: a template with Chart.js and the data put into its two slots.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace kvx::tool {

// A report's file. A file name may hold bytes that are no UTF-8: they are replaced, not thrown
// about.
std::string json_text(const nlohmann::ordered_json& json);

// Requires: {{CHART_JS}} and {{REPORT_JSON}} stand in the page once (a test holds the templates to
// it).
std::string page_with_data(std::string_view page, std::string json);

}  // namespace kvx::tool
