// Reads the #include "..." lines of src/, runner/, tools/ and python/, and names those that the
// table does not allow.
#include "tests/layers/layers.hpp"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string_view>

namespace kvx::layers {
namespace {

namespace fs = std::filesystem;

struct Source {
  fs::path path;       // relative to the root
  std::string folder;  // core, format, ..., runner, tools
};

bool is_source(const fs::path& path) {
  const std::string extension = path.extension().string();
  return extension == ".hpp" || extension == ".h" || extension == ".cpp" || extension == ".c" ||
         extension == ".inc" || extension == ".cu" || extension == ".cuh";
}

void collect(const fs::path& root, const fs::path& top, bool folder_is_second_part,
             std::vector<Source>& sources) {
  if (!fs::exists(root / top)) return;
  for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
    if (!entry.is_regular_file() || !is_source(entry.path())) continue;
    const fs::path path = fs::relative(entry.path(), root);
    // src/core/result.hpp belongs to core; a file that lies in src/ itself belongs to no folder.
    auto part = path.begin();
    if (folder_is_second_part) ++part;
    sources.push_back({path, part->string()});
  }
}

// The path of an #include "..." line. Lines with <...> include other libraries' headers.
std::optional<std::string> quoted_include(std::string_view line) {
  const auto skip_blanks = [&line] {
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  };
  skip_blanks();
  if (!line.starts_with('#')) return std::nullopt;
  line.remove_prefix(1);
  skip_blanks();
  if (!line.starts_with("include")) return std::nullopt;
  line.remove_prefix(7);
  skip_blanks();
  if (!line.starts_with('"')) return std::nullopt;
  line.remove_prefix(1);
  return std::string(line.substr(0, line.find('"')));
}

}  // namespace

// Each folder with the folders that it may include, in the order of the layers.
const AllowedEdges& allowed_edges() {
  static const AllowedEdges edges = {
      {"core", {}},
      {"format", {"core"}},
      {"device", {"core"}},
      {"cache", {"core", "device"}},
      {"ops", {"core", "format", "cache", "device"}},
      {"tier", {"core", "cache", "device"}},
      {"kv", {"core", "format", "cache", "ops", "device", "tier"}},
      {"observe", {"core", "format", "cache", "tier", "kv", "ops"}},
      {"transfer", {"core", "cache", "kv", "tier"}},
      {"engines", {"core", "format", "cache", "device", "ops"}},
      {"quality", {"core", "format", "ops", "kv"}},
      {"tune", {"core", "format", "cache", "device", "ops", "kv", "quality", "tier"}},
      {"api",
       {"core", "format", "cache", "device", "ops", "kv", "engines", "quality", "tier", "tune",
        "observe", "transfer", "kvx"}},
      {"runner", {"core", "cache", "device", "kv", "ops", "quality", "tune", "kvx"}},
      {"python",
       {"core", "format", "cache", "device", "ops", "kv", "engines", "quality", "tier", "tune",
        "observe", "transfer", "kvx"}},
      {"tools",
       {"core", "format", "cache", "device", "ops", "kv", "engines", "quality", "tier", "tune",
        "observe", "runner", "transfer", "kvx"}},
  };
  return edges;
}

std::vector<std::string> find_violations(const fs::path& root, const AllowedEdges& allowed) {
  std::vector<Source> sources;
  collect(root, "src", true, sources);
  collect(root, "runner", false, sources);
  collect(root, "tools", false, sources);
  collect(root, "python", false, sources);

  std::vector<std::string> violations;
  for (const Source& source : sources) {
    const auto edges = allowed.find(source.folder);
    if (edges == allowed.end()) {
      violations.push_back(source.path.string() + ": " + source.folder +
                           " is no folder of the table of allowed edges");
      continue;
    }
    std::ifstream file(root / source.path);
    std::string line;
    for (int number = 1; std::getline(file, line); ++number) {
      const auto include = quoted_include(line);
      if (!include) continue;
      const std::string where = source.path.string() + ":" + std::to_string(number) + ": ";
      const size_t slash = include->find('/');
      if (slash == std::string::npos || include->starts_with(".")) {
        violations.push_back(where + "\"" + *include + "\" must be written from the include root");
        continue;
      }
      const std::string target = include->substr(0, slash);
      if (target == source.folder || edges->second.contains(target)) continue;
      violations.push_back(where + source.folder + " must not include " + *include);
    }
  }
  return violations;
}

}  // namespace kvx::layers
