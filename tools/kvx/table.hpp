// Table: rows of text in aligned columns, for people and for Markdown.
#pragma once

#include <string>
#include <vector>

namespace kvx::tool {

enum class Align { kLeft, kRight };

class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // Requires: one ASCII cell a column.
  void add_row(std::vector<std::string> cells);

  // Columns are two blanks apart; the titles are bold where colour is wanted.
  std::string text(bool color) const;
  // The rows as a Markdown table.
  std::string markdown() const;

 private:
  std::vector<size_t> widths() const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace kvx::tool
