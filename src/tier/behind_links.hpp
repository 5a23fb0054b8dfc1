// behind_links: where a file lies that is written beside its place and renamed. A link that its
// name is stays a link.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>

namespace kvx::tier {

// The path itself where it is no link, or one that leads nowhere.
inline std::string behind_links(const std::string& path) {
  std::error_code problem;
  if (!std::filesystem::is_symlink(path, problem)) return path;
  const std::filesystem::path target = std::filesystem::canonical(path, problem);
  return problem ? path : target.string();
}

}  // namespace kvx::tier
