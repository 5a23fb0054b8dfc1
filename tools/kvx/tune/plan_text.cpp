// Errors of heads differ by factors of thousands, so shades are steps of their logarithm.
#include "tools/kvx/tune/plan_text.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

constexpr std::string_view kShades = " .:-=+*#%@";
constexpr double kShadeStep = 3;  // the factor of two errors whose shades are neighbours

// A bar as long as the bits: what a layer was given is seen at a glance.
std::string bar(double bits) {
  return std::string(static_cast<size_t>(std::lround(bits)), '#');
}

// "int4", or "int4; int8 in head 2": the format that most heads have, then the others' heads.
std::string formats_text(const Assignment& plan, CacheSide side, int layer) {
  std::vector<std::pair<std::string, std::vector<int>>> heads_of;
  for (int part = 0; part < plan.num_parts(); ++part) {
    const std::string& format = plan.format(side, layer, part).format;
    auto found = std::ranges::find(heads_of, format, [](const auto& entry) { return entry.first; });
    if (found == heads_of.end()) found = heads_of.insert(heads_of.end(), {format, {}});
    found->second.push_back(part);
  }
  std::ranges::stable_sort(heads_of, std::ranges::greater(),
                           [](const auto& entry) { return entry.second.size(); });
  std::string text = heads_of.front().first;
  for (size_t i = 1; i < heads_of.size(); ++i) {
    const auto& [format, heads] = heads_of[i];
    text += fmt::format("; {} in head{} {}", format, heads.size() > 1 ? "s" : "",
                        fmt::join(heads, ","));
  }
  return text;
}

std::string layer_table(const Assignment& plan, bool color) {
  Table table({{"layer", Align::kRight},
               {"K"},
               {"V"},
               {"bits", Align::kRight},
               {"K error x1000", Align::kRight},
               {"V error x1000", Align::kRight},
               {""}});
  for (int i = 0; i < plan.num_layers(); ++i) {
    table.add_row({fmt::format("{}", i), formats_text(plan, CacheSide::kK, i),
                   formats_text(plan, CacheSide::kV, i), fmt::format("{:.2f}", plan.bits(i)),
                   fmt::format("{:.3f}", 1000 * plan.error(CacheSide::kK, i)),
                   fmt::format("{:.3f}", 1000 * plan.error(CacheSide::kV, i)), bar(plan.bits(i))});
  }
  return table.text(color);
}

double largest_error(const Assignment& plan) {
  double largest = 0;
  for (int layer = 0; layer < plan.num_layers(); ++layer) {
    for (int part = 0; part < plan.num_parts(); ++part) {
      for (const CacheSide side : {CacheSide::kK, CacheSide::kV}) {
        largest = std::max(largest, plan.error(side, layer, part));
      }
    }
  }
  return largest;
}

// The largest error has the last shade, none has the first.
char shade(double error, double largest) {
  const int last = static_cast<int>(kShades.size()) - 1;
  if (!(error > 0)) return kShades.front();
  const double steps = std::log(largest / error) / std::log(kShadeStep);
  return kShades[static_cast<size_t>(std::max(1L, last - std::lround(steps)))];
}

std::string head_picture(const Assignment& plan, bool color) {
  Table table({{"layer", Align::kRight},
               {"K's bits, head by head"},
               {"errors"},
               {"V's bits, head by head"},
               {"errors"}});
  const double largest = largest_error(plan);
  for (int layer = 0; layer < plan.num_layers(); ++layer) {
    std::vector<std::string> row = {fmt::format("{}", layer)};
    for (const CacheSide side : {CacheSide::kK, CacheSide::kV}) {
      std::string bits;
      std::string shades = "|";
      for (int part = 0; part < plan.num_parts(); ++part) {
        bits += fmt::format("{:5.1f}", plan.format(side, layer, part).bits);
        shades += shade(plan.error(side, layer, part), largest);
      }
      row.push_back(bits);
      row.push_back(shades + "|");
    }
    table.add_row(row);
  }
  return table.text(color) +
         fmt::format("shades of errors, the largest last: '{}', a factor of {} each\n",
                     kShades.substr(1), kShadeStep);
}

}  // namespace

std::string plan_text(const Assignment& plan, bool color) {
  std::string text = layer_table(plan, color);
  if (plan.num_parts() > 1) text += fmt::format("\n{}", head_picture(plan, color));
  return text;
}

}  // namespace kvx::tool
