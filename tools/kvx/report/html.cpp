// Reports as pages: a template with the style, the library and the data put into its slots.
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

// "</" would end the script element early: "<\/" means the same to JSON and nothing to HTML.
std::string safe_in_script(std::string text) {
  for (size_t at = 0; (at = text.find("</", at)) != std::string::npos; at += 3) {
    text.insert(at + 1, "\\");
  }
  return text;
}

}  // namespace

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
