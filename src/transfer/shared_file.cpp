// SharedFile: names are random, so that processes do not meet.
#include "transfer/shared_file.hpp"

#include <cerrno>
#include <cstring>

#include "core/os/os.hpp"
#include "core/random_id.hpp"

namespace kvx::transfer {

Result<SharedFile> SharedFile::create() {
  return SharedFile(
      fmt::format("{}/kvx-{}-{:016x}", os::shared_memory_folder(), os::process_id(), random_id()));
}

SharedFile::SharedFile(SharedFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {
  other.path_.clear();
}

SharedFile::~SharedFile() {
  if (descriptor_ >= 0) os::close_file(descriptor_);
  if (!path_.empty()) os::remove_file(path_);
}

Status SharedFile::open_written() {
  descriptor_ = os::open_file(path_, os::Open::kRead);
  if (descriptor_ >= 0) return {};
  return internal_error("'{}' cannot be opened ({})", path_, std::strerror(errno));
}

Status SharedFile::open_empty() {
  descriptor_ = os::open_file(path_, os::Open::kNew);
  if (descriptor_ >= 0) return {};
  return invalid_argument("'{}' cannot be made ({}); expected shared memory that may be written",
                          path_, std::strerror(errno));
}

int64_t SharedFile::bytes() const {
  return os::facts_of(descriptor_).value_or(os::FileFacts()).bytes;
}

Status SharedFile::read_at(int64_t offset, std::span<uint8_t> bytes) const {
  while (!bytes.empty()) {
    const int64_t count = os::read_at(descriptor_, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return internal_error("'{}' ends before byte {}", path_, offset);
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += count;
  }
  return {};
}

Status SharedFile::write_at(int64_t offset, std::span<const uint8_t> bytes) const {
  while (!bytes.empty()) {
    const int64_t count = os::write_at(descriptor_, bytes, offset);
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
