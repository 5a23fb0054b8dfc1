// Reading and writing a file at once.
#include "tier/whole_file.hpp"

#include <cerrno>
#include <cstring>
#include <optional>

#include "core/os/os.hpp"
#include "tier/behind_links.hpp"
#include "tier/temporary_file.hpp"
#include "tier/whole_transfer.hpp"

namespace kvx::tier {
namespace {

// Closes the descriptor, and removes the temporary file unless it got its name.
class Writing {
 public:
  explicit Writing(TemporaryFile file) : file_(std::move(file)) {}
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;
  ~Writing() {
    os::close_file(file_.descriptor);
    if (!is_renamed_) os::remove_file(file_.path);
  }

  bool write(std::span<const uint8_t> bytes) const {
    return transfer_all(bytes.size(), [&](size_t done) {
      return os::write_at(file_.descriptor, bytes.subspan(done), static_cast<int64_t>(done));
    });
  }
  bool sync() const { return os::sync_file(file_.descriptor); }
  bool rename_to(const std::string& place) {
    is_renamed_ = os::rename_file(file_.path, place);
    return is_renamed_;
  }

 private:
  TemporaryFile file_;
  bool is_renamed_ = false;
};

}  // namespace

Error file_error(const std::string& path, std::string_view what) {
  return invalid_argument("'{}' {}: {}", path, what, std::strerror(errno));
}

Status sync_folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (os::sync_folder(folder)) return {};
  return file_error(folder, "cannot be synced");
}

Status check_place(const std::string& path) {
  const std::optional<os::FileFacts> facts = os::facts_of(path);
  if (!facts && errno == ELOOP) return file_error(path, "cannot be written");
  if (facts && !facts->is_regular) return invalid_argument("'{}' is no regular file", path);
  return {};
}

Result<std::vector<uint8_t>> read_whole_file(const std::string& path, int64_t most_bytes) {
  const int descriptor = os::open_file(path, os::Open::kRead);
  if (descriptor < 0) return file_error(path, "cannot be read");
  const os::FileFacts facts = os::facts_of(descriptor).value_or(os::FileFacts());
  std::vector<uint8_t> bytes;
  bool is_read = false;
  if (facts.is_regular && facts.bytes <= most_bytes) {
    bytes.resize(static_cast<size_t>(facts.bytes));
    is_read = transfer_all(bytes.size(), [&](size_t done) {
      return os::read_at(descriptor, std::span(bytes).subspan(done), static_cast<int64_t>(done));
    });
  }
  const Error error = file_error(path, "cannot be read");
  os::close_file(descriptor);
  if (!facts.is_regular) return invalid_argument("'{}' is no regular file", path);
  if (facts.bytes > most_bytes) {
    return invalid_argument("'{}' has {} bytes; expected at most {}", path, facts.bytes,
                            most_bytes);
  }
  if (!is_read) return error;
  return bytes;
}

Status write_whole_file(const std::string& path, std::span<const uint8_t> bytes) {
  KVX_RETURN_IF_ERROR(check_place(path));
  const std::string place = behind_links(path);
  KVX_ASSIGN_OR_RETURN(TemporaryFile temporary, create_temporary(place));
  Writing writing(std::move(temporary));
  if (!writing.write(bytes)) return file_error(path, "cannot be written");
  if (!writing.sync()) return file_error(path, "cannot be synced");
  if (!writing.rename_to(place)) return file_error(path, "cannot be replaced");
  return sync_folder_of(place);
}

}  // namespace kvx::tier
