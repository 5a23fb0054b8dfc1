// mmap, and the errors of opening a file in words.
#include "runner/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvx::runner {

Result<MappedFile> MappedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return invalid_argument("{}: cannot be opened: {}", path, std::strerror(errno));
  struct stat info {};
  const bool is_file = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (!is_file || info.st_size == 0) {
    ::close(fd);
    return invalid_argument("{}: {}", path, is_file ? "is empty" : "is not a regular file");
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int map_errno = errno;
  ::close(fd);
  if (address == MAP_FAILED) {
    return invalid_argument("{}: cannot be mapped: {}", path, std::strerror(map_errno));
  }
  return MappedFile({static_cast<const uint8_t*>(address), size});
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

void MappedFile::release_pages() const {
  ::madvise(const_cast<uint8_t*>(bytes_.data()), bytes_.size(), MADV_DONTNEED);
}

}  // namespace kvx::runner
