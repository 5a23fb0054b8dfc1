// behind_links: the file that a path leads to, through all symbolic links, so that a file that is
// written beside its target and renamed leaves the links as they are.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>

namespace kvx::tier {

// The path itself where it is no link. The target of a link may be missing. Links that lead in a
// circle end at one of them.
inline std::string behind_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // Linux's own limit
  std::filesystem::path place = path;
  std::error_code problem;
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(place, problem); ++i) {
    const std::filesystem::path target = std::filesystem::read_symlink(place, problem);
    if (problem) break;
    place = place.parent_path() / target;  // an absolute target replaces the folder
  }
  return place.string();
}

}  // namespace kvx::tier
