// Reports as pages: a template with the style, the library and the data put into its slots.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tools/kvx/embedded.hpp"
#include "tools/kvx/report/page.hpp"
#include "tools/kvx/report/report.hpp"

namespace kvx::tool {
namespace {

// Requires: slot stands in page once.
void fill(std::string& page, std::string_view slot, std::string_view content) {
  page.replace(page.find(slot), slot.size(), content);
}

// "</script" would end the script element early and "<!--<script" keep it open: "\u003c" is "<" to
// JSON and nothing to HTML. JSON has it in strings alone.
std::string safe_in_script(std::string text) {
  constexpr std::string_view kEscaped = "\\u003c";
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos; at += kEscaped.size()) {
    text.replace(at, 1, kEscaped);
  }
  return text;
}

}  // namespace

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string page_with_data(std::string_view page, std::string json) {
  std::string filled(page);
  // The data last: a name in the data may look like a slot.
  fill(filled, "{{PAGE_CSS}}", page_css());
  fill(filled, "{{CHART_JS}}", chart_js());
  fill(filled, "{{REPORT_JSON}}", safe_in_script(std::move(json)));
  return filled;
}

std::string report_html(const CompareReport& report) {
  return page_with_data(report_page(), report_json(report));
}

}  // namespace kvx::tool
