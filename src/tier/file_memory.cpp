// FileMemory: unnamed files, their room and their addresses.
#include "tier/file_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "core/log.hpp"
#include "tier/whole_transfer.hpp"

namespace kvx::tier {
namespace {

// Without a name from the start; where the file system has no such files, with one for a moment.
int open_unnamed(const std::string& folder) {
  const int unnamed = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (unnamed >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return unnamed;
  std::string name = folder + "/kvx-tier-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

// A file system that cannot keep room makes a file that takes it as it is written.
bool reserve(int descriptor, int64_t bytes) {
  while (fallocate(descriptor, 0, 0, bytes) != 0) {
    if (errno == EOPNOTSUPP) return ftruncate(descriptor, bytes) == 0;
    if (errno != EINTR) return false;
  }
  return true;
}

}  // namespace

Result<std::unique_ptr<FileMemory>> FileMemory::create(std::string folder) {
  const int descriptor = open_unnamed(folder);
  if (descriptor < 0) {
    return invalid_argument("'{}' takes no files ({}); expected a folder that may be written",
                            folder, std::strerror(errno));
  }
  close(descriptor);
  return std::unique_ptr<FileMemory>(new FileMemory(std::move(folder)));
}

Error FileMemory::failed(std::string_view what) const {
  return internal_error("a file in '{}' could not be {}: {}", folder_, what,
                        errno == 0 ? "it ended" : std::strerror(errno));
}

Result<uint8_t*> FileMemory::allocate_zeroed(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  files_.reserve(files_.size() + 1);  // before there is anything to give back
  const int descriptor = open_unnamed(folder_);
  if (descriptor < 0) return failed("made");
  if (!reserve(descriptor, bytes)) {
    const Error error =
        out_of_range("'{}' has no room for {} bytes: {}", folder_, bytes, std::strerror(errno));
    close(descriptor);
    return error;
  }
  void* const mapped =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (mapped == MAP_FAILED) {
    close(descriptor);
    return out_of_range("no addresses for {} bytes", bytes);
  }
  auto* const begin = static_cast<uint8_t*>(mapped);
  files_.push_back({begin, bytes, descriptor});
  return begin;
}

void FileMemory::free(uint8_t* data, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto file =
      std::ranges::find_if(files_, [data](const File& one) { return one.begin == data; });
  close(file->descriptor);
  files_.erase(file);
  munmap(data, bytes);
}

// Requires: an address of a region.
FileMemory::Place FileMemory::place_of(const uint8_t* address) const {
  const std::lock_guard lock(mutex_);
  const auto file = std::ranges::find_if(files_, [address](const File& one) {
    return one.begin <= address && address < one.begin + one.bytes;
  });
  return {file->descriptor, address - file->begin};
}

Status FileMemory::read(const uint8_t* from, std::span<uint8_t> to) const {
  const Place place = place_of(from);
  const bool is_read = transfer_all(to.size(), [&](size_t done) {
    return pread(place.descriptor, to.data() + done, to.size() - done,
                 place.offset + static_cast<int64_t>(done));
  });
  if (!is_read) return failed("read");
  return {};
}

Status FileMemory::write(uint8_t* to, std::span<const uint8_t> from) {
  const Place place = place_of(to);
  const bool is_written = transfer_all(from.size(), [&](size_t done) {
    return pwrite(place.descriptor, from.data() + done, from.size() - done,
                  place.offset + static_cast<int64_t>(done));
  });
  if (!is_written) return failed("written");
  return {};
}

void FileMemory::clear(uint8_t* data, int64_t bytes) {
  static constexpr std::array<uint8_t, 64 << 10> kZeros = {};
  for (int64_t at = 0; at < bytes; at += std::ssize(kZeros)) {
    const int64_t here = std::min<int64_t>(std::ssize(kZeros), bytes - at);
    const Status written = write(data + at, std::span(kZeros).first(static_cast<size_t>(here)));
    if (written.ok()) continue;
    log(LogLevel::kWarning, "{} bytes were not cleared: {}", bytes - at, written.error().message);
    return;
  }
}

}  // namespace kvx::tier
