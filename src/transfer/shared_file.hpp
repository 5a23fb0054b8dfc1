// SharedFile: a file in shared memory (/dev/shm), gone when its maker is.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/result.hpp"

namespace kvx::transfer {

class SharedFile {
 public:
  // A name that nobody has; nothing is there yet.
  static Result<SharedFile> create();
  SharedFile(SharedFile&& other) noexcept;
  SharedFile& operator=(SharedFile&&) = delete;
  ~SharedFile();

  const std::string& path() const { return path_; }
  // Opens what somebody has written to path(). INTERNAL_ERROR: it is not there.
  Status open_written();
  // Opens it, empty, readable by this user alone. INVALID_ARGUMENT: shared memory refuses it.
  Status open_empty();
  int64_t bytes() const;
  // Requires: it is open. INTERNAL_ERROR: fewer bytes than wanted.
  Status read_at(int64_t offset, std::span<uint8_t> bytes) const;
  // OUT_OF_RANGE: shared memory is full.
  Status write_at(int64_t offset, std::span<const uint8_t> bytes) const;

 private:
  explicit SharedFile(std::string path) : path_(std::move(path)) {}

  std::string path_;
  int descriptor_ = -1;
};

}  // namespace kvx::transfer
