// FileMemory: memory whose bytes lie in files of a folder, for blocks that fit nowhere else. The
// files have no names: they are gone with the process, however it ends.
//
// Regions have addresses like any other, but who moves bytes calls read() and write(): what a disk
// refuses is an error there, and a signal at an address.
#pragma once

#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cache/pool/memory.hpp"

namespace kvx::tier {

class FileMemory final : public cache::Memory {
 public:
  // INVALID_ARGUMENT: no folder, or none that may be written.
  static Result<std::unique_ptr<FileMemory>> create(std::string folder);

  cache::MemoryKind kind() const override { return cache::MemoryKind::kHost; }
  void clear(uint8_t* data, int64_t bytes) override;

  // Bytes of one region; from any thread. INTERNAL_ERROR: the system's text.
  Status read(const uint8_t* from, std::span<uint8_t> to) const;
  Status write(uint8_t* to, std::span<const uint8_t> from);

 protected:
  // The disk's room is taken at once, where its file system can do that.
  Result<uint8_t*> allocate_zeroed(int64_t bytes) override;
  void free(uint8_t* data, int64_t bytes) override;

 private:
  struct File {
    uint8_t* begin;
    int64_t bytes;
    int descriptor;
  };
  struct Place {
    int descriptor;
    int64_t offset;
  };

  explicit FileMemory(std::string folder) : folder_(std::move(folder)) {}
  Place place_of(const uint8_t* address) const;
  Error failed(std::string_view what) const;

  const std::string folder_;
  mutable std::mutex mutex_;
  std::vector<File> files_;
};

}  // namespace kvx::tier
