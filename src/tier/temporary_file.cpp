// Names, locks and owners of temporary files.
#include "tier/temporary_file.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>

#include "core/os/os.hpp"
#include "tier/behind_links.hpp"
#include "tier/cache_file.hpp"

namespace kvx::tier {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".tmp";

// Takes ".<number>" off the end of a name.
std::optional<int64_t> take_number(std::string_view& name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(dot + 1);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size() || number < 0) {
    return std::nullopt;
  }
  name.remove_suffix(name.size() - dot);
  return number;
}

struct ParsedName {
  std::string_view file;  // the cache file's name
  int64_t writer = 0;
};
std::optional<ParsedName> parse_name(std::string_view name) {
  if (!name.ends_with(kSuffix)) return std::nullopt;
  name.remove_suffix(kSuffix.size());
  const std::optional<int64_t> number = take_number(name);
  const std::optional<int64_t> writer = number ? take_number(name) : std::nullopt;
  if (!writer || *writer < 1 || *writer > INT32_MAX || name.empty()) return std::nullopt;
  return ParsedName{name, *writer};
}

// A writer of another container has another process's number or none here, but its lock is seen.
bool is_locked(const std::string& path) {
  const int descriptor = os::open_file(path, os::Open::kReadWrite, os::Links::kRefuse);
  if (descriptor < 0) return true;
  const bool is_taken = os::try_lock_file(descriptor);
  os::close_file(descriptor);
  return !is_taken;
}

// A writer begins with the magic bytes of a cache file, so that no other program's file is taken
// for one of ours; a writer that was killed before has left an empty file.
bool looks_like_ours(const std::string& path) {
  const int descriptor = os::open_file(path, os::Open::kRead, os::Links::kRefuse);
  if (descriptor < 0) return false;
  std::array<uint8_t, kFileMagic.size()> bytes;
  const std::optional<os::FileFacts> facts = os::facts_of(descriptor);
  const int64_t num_read = facts && facts->is_regular ? os::read_at(descriptor, bytes, 0) : -1;
  os::close_file(descriptor);
  return num_read == 0 || (num_read == std::ssize(bytes) && bytes == kFileMagic);
}

// An existing abandoned file under the new name; false where there is none, or another writer was
// faster.
bool take_over(const std::vector<std::string>& abandoned, const std::string& temporary) {
  bool is_taken = false;
  for (const std::string& path : abandoned) {
    if (!is_taken && os::rename_file(path, temporary)) {
      is_taken = true;
    } else {
      os::remove_file(path);
    }
  }
  return is_taken;
}

std::string folder_of(const fs::path& place) {
  return place.has_parent_path() ? place.parent_path().string() : ".";
}

}  // namespace

Result<TemporaryFile> create_temporary(const std::string& place) {
  static std::atomic<uint64_t> num_writers{0};  // two of a process may write to one path at once
  const std::string temporary =
      fmt::format("{}.{}.{}{}", place, os::process_id(), num_writers++, kSuffix);
  const auto abandoned =
      abandoned_temporaries(folder_of(place), fs::path(place).filename().string());
  if (abandoned.ok()) take_over(abandoned.value(), temporary);
  const int descriptor = os::open_file(temporary, os::Open::kAny, os::Links::kRefuse);
  // The lock comes first: an abandoned file's bytes are dropped by who holds it.
  if (descriptor >= 0 && os::try_lock_file(descriptor) && os::resize_file(descriptor, 0)) {
    return TemporaryFile{temporary, descriptor};
  }
  const int why = errno;
  if (descriptor >= 0) os::close_file(descriptor);
  return invalid_argument("'{}' cannot be written: {}", place, std::strerror(why));
}

Result<std::vector<std::string>> abandoned_temporaries(const std::string& folder,
                                                       const std::string& name) {
  std::vector<std::string> abandoned;
  std::error_code problem;
  fs::directory_iterator entries(folder, problem);
  for (; !problem && entries != fs::directory_iterator(); entries.increment(problem)) {
    const std::string entry = entries->path().filename().string();
    const std::optional<ParsedName> parsed = parse_name(entry);
    if (!parsed || (!name.empty() && parsed->file != name)) continue;
    const std::string path = entries->path().string();
    if (os::is_process_gone(parsed->writer) && looks_like_ours(path) && !is_locked(path)) {
      abandoned.push_back(path);
    }
  }
  if (problem) {
    return invalid_argument("folder '{}' cannot be read: {}", folder, problem.message());
  }
  std::sort(abandoned.begin(), abandoned.end());
  return abandoned;
}

Result<PruneReport> prune_temporaries(const std::string& path) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  const fs::path place = is_folder ? fs::path(path) : fs::path(behind_links(path));
  KVX_ASSIGN_OR_RETURN(
      const std::vector<std::string> abandoned,
      abandoned_temporaries(is_folder ? place.string() : folder_of(place),
                            is_folder ? std::string() : place.filename().string()));
  PruneReport report;
  for (const std::string& one : abandoned) {
    const std::optional<os::FileFacts> facts = os::facts_of(one);
    if (!facts) continue;  // another process removed it
    if (!os::remove_file(one) && errno != ENOENT) {
      return invalid_argument("'{}' cannot be removed: {}", one, std::strerror(errno));
    }
    report.removed.push_back(one);
    report.bytes += facts->bytes;
  }
  return report;
}

}  // namespace kvx::tier
