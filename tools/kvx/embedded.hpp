// Files that the build puts into the program (embed.cmake), so that a report needs nothing beside
// itself.
#pragma once

#include <string_view>

namespace kvx::tool {

std::string_view report_page();  // report/report.html
std::string_view stress_page();  // stress/stress.html
std::string_view replay_page();  // replay/replay.html
std::string_view page_css();     // report/page.css: of both pages
std::string_view chart_js();     // Chart.js (MIT), Debian's libjs-chart.js

}  // namespace kvx::tool
