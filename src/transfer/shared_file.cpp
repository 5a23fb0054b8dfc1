// SharedFile: names are random, so that processes do not meet.
#include "transfer/shared_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/random_id.hpp"

namespace kvx::transfer {

Result<SharedFile> SharedFile::create() {
  return SharedFile(fmt::format("/dev/shm/kvx-{}-{:016x}", getpid(), random_id()));
}

SharedFile::SharedFile(SharedFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {
  other.path_.clear();
}

SharedFile::~SharedFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!path_.empty()) unlink(path_.c_str());
}

Status SharedFile::open_written() {
  descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ >= 0) return {};
  return internal_error("'{}' cannot be opened ({})", path_, std::strerror(errno));
}

Status SharedFile::open_empty() {
  descriptor_ = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (descriptor_ >= 0) return {};
  return invalid_argument("'{}' cannot be made ({}); expected shared memory that may be written",
                          path_, std::strerror(errno));
}

int64_t SharedFile::bytes() const {
  struct stat facts = {};
  return fstat(descriptor_, &facts) == 0 ? facts.st_size : 0;
}

Status SharedFile::read_at(int64_t offset, std::span<uint8_t> bytes) const {
  while (!bytes.empty()) {
    const ssize_t count = pread(descriptor_, bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return internal_error("'{}' ends before byte {}", path_, offset);
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += count;
  }
  return {};
}

Status SharedFile::write_at(int64_t offset, std::span<const uint8_t> bytes) const {
  while (!bytes.empty()) {
    const ssize_t count = pwrite(descriptor_, bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return out_of_range("'{}' has no room for byte {} ({}); expected more shared memory", path_,
                          offset, std::strerror(errno));
    }
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += count;
  }
  return {};
}

}  // namespace kvx::transfer
