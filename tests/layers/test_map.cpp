// Reads tests/README.md and compares it with the folders and files of src/ and tests/.
#include "tests/layers/test_map.hpp"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

namespace kvx::layers {
namespace {

namespace fs = std::filesystem;

// A row of the page: | `src/a/x.cpp` | `a/y_test.cpp`, `b/` |
struct Row {
  std::string source;
  std::vector<std::string> tests;
};

// The texts between pairs of backticks.
std::vector<std::string> quoted_texts(const std::string& line) {
  std::vector<std::string> texts;
  for (size_t begin = line.find('`'); begin != std::string::npos;) {
    const size_t end = line.find('`', begin + 1);
    if (end == std::string::npos) break;
    texts.push_back(line.substr(begin + 1, end - begin - 1));
    begin = line.find('`', end + 1);
  }
  return texts;
}

std::vector<Row> read_rows(const fs::path& page) {
  std::vector<Row> rows;
  std::ifstream file(page);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| `src/")) continue;
    std::vector<std::string> texts = quoted_texts(line);
    if (texts.empty()) continue;
    rows.push_back({texts.front(), {texts.begin() + 1, texts.end()}});
  }
  return rows;
}

// How many files each folder below `top` directly holds. Folders are relative to the root, with a
// '/' at the end. A folder without files is left out.
std::map<std::string, int> files_by_folder(const fs::path& root, const char* top) {
  std::map<std::string, int> folders;
  for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
    if (!entry.is_regular_file()) continue;
    ++folders[fs::relative(entry.path().parent_path(), root).string() + "/"];
  }
  return folders;
}

// The .cpp files below `top`, relative to the root.
std::set<std::string> cpp_files(const fs::path& root, const char* top) {
  std::set<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
    if (!entry.is_regular_file() || entry.path().extension() != ".cpp") continue;
    files.insert(fs::relative(entry.path(), root).string());
  }
  return files;
}

bool has_test_of_its_name(const fs::path& root, const fs::path& source) {
  const std::string name = source.stem().string() + "_test.cpp";
  for (fs::path folder = fs::relative(source.parent_path(), "src"); !folder.empty();
       folder = folder.parent_path()) {
    if (fs::exists(root / "tests" / folder / name)) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> find_large_folders(const fs::path& root, int most) {
  std::vector<std::string> errors;
  for (const auto& [folder, count] : files_by_folder(root, "src")) {
    if (count <= most) continue;
    errors.push_back(folder + " holds " + std::to_string(count) + " files; expected at most " +
                     std::to_string(most));
  }
  return errors;
}

std::vector<std::string> find_map_errors(const fs::path& root) {
  std::vector<std::string> errors;
  std::set<std::string> listed;
  std::string previous_folder;
  std::string previous_file;
  for (const Row& row : read_rows(root / "tests/README.md")) {
    if (!fs::exists(root / row.source)) errors.push_back(row.source + " does not exist");
    if (row.tests.empty()) errors.push_back(row.source + " is listed without a test");
    for (const std::string& test : row.tests) {
      if (fs::exists(root / "tests" / test)) continue;
      errors.push_back(row.source + ": tests/" + test + " does not exist");
    }
    std::string& previous = row.source.ends_with('/') ? previous_folder : previous_file;
    if (row.source <= previous) {
      errors.push_back(row.source + " follows " + previous + "; expected alphabetical order");
    }
    previous = row.source;
    listed.insert(row.source);
  }
  for (const auto& [folder, count] : files_by_folder(root, "src")) {
    if (folder == "src/" || listed.contains(folder)) continue;
    errors.push_back(folder + " is not listed in tests/README.md");
  }
  for (const std::string& source : cpp_files(root, "src")) {
    if (listed.contains(source) || has_test_of_its_name(root, source)) continue;
    errors.push_back(source + " has no test of its name and no line in tests/README.md");
  }
  return errors;
}

}  // namespace kvx::layers
