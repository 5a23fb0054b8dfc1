// MappedFile: a whole file, read-only, in memory without reading it first.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/result.hpp"

namespace kvx::runner {

class MappedFile {
 public:
  // INVALID_ARGUMENT: the path cannot be opened, is no regular file, or is empty.
  static Result<MappedFile> open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const uint8_t> bytes() const { return bytes_; }
  // Lets the kernel take back the pages read so far; reading them again reads the file again.
  void release_pages() const;

 private:
  explicit MappedFile(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  std::span<const uint8_t> bytes_;
};

}  // namespace kvx::runner
