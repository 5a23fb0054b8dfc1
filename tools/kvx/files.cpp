// Reading and writing whole files; every message names the option that gave the path.
#include "tools/kvx/files.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace kvx::tool {
namespace fs = std::filesystem;

Status check_can_write(const std::string& field, const std::string& path) {
  std::error_code ignored;
  const fs::path folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : ".";
  if (path.empty() || fs::is_directory(path, ignored)) {
    return invalid_argument("{} is '{}'; expected the name of a file", field, path);
  }
  if (!fs::is_directory(folder, ignored)) {
    return invalid_argument("{} is '{}'; expected a file in an existing folder", field, path);
  }
  if (access(folder.c_str(), W_OK) != 0) {
    return invalid_argument("{} is '{}'; expected a file in a folder that can be written", field,
                            path);
  }
  return {};
}

Status write_file(const std::string& field, const std::string& path, std::string_view content) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, getpid());
  std::ofstream file(temporary, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  std::error_code error;
  if (file) fs::rename(temporary, path, error);
  if (!file || error) {
    const std::string reason = error ? error.message() : std::strerror(errno);
    fs::remove(temporary, error);
    return invalid_argument("{} is '{}'; it cannot be written ({})", field, path, reason);
  }
  return {};
}

Result<std::string> read_file(const std::string& field, const std::string& path) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  std::ifstream file(path, std::ios::binary);
  if (is_folder || !file) {
    return invalid_argument("{} is '{}'; expected a file that can be read", field, path);
  }
  std::ostringstream content;
  content << file.rdbuf();
  return std::move(content).str();
}

}  // namespace kvx::tool
