// Table pads every cell to its column's width.
#include "tools/kvx/table.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvx::tool {
namespace {

std::string padded(const std::string& cell, size_t width, Align align) {
  return align == Align::kLeft ? fmt::format("{:<{}}", cell, width)
                               : fmt::format("{:>{}}", cell, width);
}

void trim_right(std::string& line) {
  line.erase(line.find_last_not_of(' ') + 1);
}

}  // namespace

void Table::add_row(std::vector<std::string> cells) {
  rows_.push_back(std::move(cells));
}

std::vector<size_t> Table::widths() const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = columns_[c].title.size();
    for (const auto& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  return widths;
}

std::string Table::text(bool color) const {
  const std::vector<size_t> widths = this->widths();
  std::string header;
  for (size_t c = 0; c < columns_.size(); ++c) {
    header += padded(columns_[c].title, widths[c], columns_[c].align) + "  ";
  }
  trim_right(header);
  std::string text = color ? "\x1b[1m" + header + "\x1b[0m\n" : header + "\n";
  for (const auto& row : rows_) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      line += padded(row[c], widths[c], columns_[c].align) + "  ";
    }
    trim_right(line);
    text += line + "\n";
  }
  return text;
}

std::string Table::markdown() const {
  std::string text = "|";
  for (const Column& column : columns_) text += " " + column.title + " |";
  text += "\n|";
  for (const Column& column : columns_) text += column.align == Align::kLeft ? "---|" : "---:|";
  text += "\n";
  for (const auto& row : rows_) {
    text += "|";
    for (const std::string& cell : row) text += " " + cell + " |";
    text += "\n";
  }
  return text;
}

}  // namespace kvx::tool
