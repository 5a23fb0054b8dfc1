// Reading and writing whole files; every message names the option that gave the path.
#include "tools/kvx/files.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tier/behind_links.hpp"

namespace kvx::tool {
namespace fs = std::filesystem;

namespace {

// Devices and pipes are written as they are: a rename would put a file in their place.
bool is_device_or_pipe(const std::string& path) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  return fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
}

bool write_whole(const std::string& path, std::string_view content) {
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  return !file.fail();
}

Error cannot_be_written(const std::string& field, const std::string& path,
                        const std::string& reason) {
  return invalid_argument("{} is '{}'; it cannot be written ({})", field, path, reason);
}

}  // namespace

Status check_can_write(const std::string& field, const std::string& path) {
  std::error_code ignored;
  if (path.empty() || fs::is_directory(path, ignored)) {
    return invalid_argument("{} is '{}'; expected the name of a file", field, path);
  }
  if (is_device_or_pipe(path)) {
    if (access(path.c_str(), W_OK) == 0) return {};
    return cannot_be_written(field, path, std::strerror(errno));
  }
  const fs::path place = tier::behind_links(path);
  const fs::path folder = place.has_parent_path() ? place.parent_path() : ".";
  if (!fs::is_directory(folder, ignored)) {
    return invalid_argument("{} is '{}'; expected a file in an existing folder", field, path);
  }
  if (access(folder.string().c_str(), W_OK) != 0) {
    return invalid_argument("{} is '{}'; expected a file in a folder that can be written", field,
                            path);
  }
  return {};
}

Status check_outputs(std::span<const OutputFile> outputs) {
  const auto place_of = [](const std::string& path) {
    std::error_code ignored;
    return fs::weakly_canonical(fs::absolute(tier::behind_links(path), ignored), ignored);
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    const OutputFile& one = outputs[i];
    if (one.path.empty()) continue;
    KVX_RETURN_IF_ERROR(check_can_write(one.field, one.path));
    if (is_device_or_pipe(one.path)) continue;
    for (const OutputFile& earlier : outputs.first(i)) {
      if (earlier.path.empty() || place_of(earlier.path) != place_of(one.path)) continue;
      return invalid_argument("{} and {} are both '{}'; expected two files", earlier.field,
                              one.field, one.path);
    }
  }
  return {};
}

Status check_can_replace(const std::string& field, const std::string& path) {
  if (!is_device_or_pipe(path)) return check_can_write(field, path);
  return invalid_argument("{} is '{}'; expected a regular file", field, path);
}

Status write_file(const std::string& field, const std::string& path, std::string_view content) {
  if (is_device_or_pipe(path)) {
    if (write_whole(path, content)) return {};
    return cannot_be_written(field, path, std::strerror(errno));
  }
  const std::string place = tier::behind_links(path);
  const std::string temporary = fmt::format("{}.{}.tmp", place, getpid());
  std::error_code error;
  const bool is_written = write_whole(temporary, content);
  if (is_written) fs::rename(temporary, place, error);
  if (is_written && !error) return {};
  const std::string reason = error ? error.message() : std::strerror(errno);
  fs::remove(temporary, error);
  return cannot_be_written(field, path, reason);
}

std::string file_name(const std::string& path) {
  return fs::path(path).filename().string();
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
