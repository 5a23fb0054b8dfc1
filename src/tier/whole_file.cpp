// Reading and writing a file at once.
#include "tier/whole_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

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
    close(file_.descriptor);
    if (!is_renamed_) unlink(file_.path.c_str());
  }

  bool write(std::span<const uint8_t> bytes) const {
    return transfer_all(bytes.size(), [&](size_t done) {
      return ::write(file_.descriptor, bytes.data() + done, bytes.size() - done);
    });
  }
  bool sync() const { return fsync(file_.descriptor) == 0; }
  bool rename_to(const std::string& place) {
    is_renamed_ = ::rename(file_.path.c_str(), place.c_str()) == 0;
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
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return file_error(folder, "cannot be opened");
  const bool is_synced = fsync(descriptor) == 0;
  const Error error = file_error(folder, "cannot be synced");
  close(descriptor);
  return is_synced ? Status{} : Status{error};
}

Status check_place(const std::string& path) {
  struct stat facts;
  const bool exists = stat(path.c_str(), &facts) == 0;
  if (!exists && errno == ELOOP) return file_error(path, "cannot be written");
  if (exists && !S_ISREG(facts.st_mode)) return invalid_argument("'{}' is no regular file", path);
  return {};
}

Result<std::vector<uint8_t>> read_whole_file(const std::string& path, int64_t most_bytes) {
  // A pipe without a writer would keep open() waiting.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return file_error(path, "cannot be read");
  struct stat facts;
  const bool is_file = fstat(descriptor, &facts) == 0 && S_ISREG(facts.st_mode);
  std::vector<uint8_t> bytes;
  bool is_read = false;
  if (is_file && facts.st_size <= most_bytes) {
    bytes.resize(static_cast<size_t>(facts.st_size));
    is_read = transfer_all(bytes.size(), [&](size_t done) {
      return read(descriptor, bytes.data() + done, bytes.size() - done);
    });
  }
  const Error error = file_error(path, "cannot be read");
  close(descriptor);
  if (!is_file) return invalid_argument("'{}' is no regular file", path);
  if (facts.st_size > most_bytes) {
    return invalid_argument("'{}' has {} bytes; expected at most {}", path, facts.st_size,
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
