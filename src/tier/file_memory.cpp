// FileMemory: unnamed files, their room and their addresses.
#include "tier/file_memory.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/log.hpp"
#include "core/os/os.hpp"
#include "tier/whole_transfer.hpp"

namespace kvx::tier {
Result<std::unique_ptr<FileMemory>> FileMemory::create(std::string folder) {
  const int descriptor = os::open_unnamed(folder);
  if (descriptor < 0) {
    return invalid_argument("'{}' takes no files ({}); expected a folder that may be written",
                            folder, std::strerror(errno));
  }
  os::close_file(descriptor);
  return std::unique_ptr<FileMemory>(new FileMemory(std::move(folder)));
}

Error FileMemory::failed(std::string_view what) const {
  return internal_error("a file in '{}' could not be {}: {}", folder_, what,
                        errno == 0 ? "it ended" : std::strerror(errno));
}

Result<uint8_t*> FileMemory::allocate_zeroed(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  files_.reserve(files_.size() + 1);  // before there is anything to give back
  const int descriptor = os::open_unnamed(folder_);
  if (descriptor < 0) return failed("made");
  if (!os::reserve_file(descriptor, bytes)) {
    const Error error =
        out_of_range("'{}' has no room for {} bytes: {}", folder_, bytes, std::strerror(errno));
    os::close_file(descriptor);
    return error;
  }
  uint8_t* const begin = os::map_file(descriptor, bytes);
  if (begin == nullptr) {
    os::close_file(descriptor);
    return out_of_range("no addresses for {} bytes", bytes);
  }
  files_.push_back({begin, bytes, descriptor});
  return begin;
}

void FileMemory::free(uint8_t* data, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto file =
      std::ranges::find_if(files_, [data](const File& one) { return one.begin == data; });
  os::close_file(file->descriptor);
  files_.erase(file);
  os::unmap_file(data, bytes);
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
    return os::read_at(place.descriptor, to.subspan(done),
                       place.offset + static_cast<int64_t>(done));
  });
  if (!is_read) return failed("read");
  return {};
}

Status FileMemory::write(uint8_t* to, std::span<const uint8_t> from) {
  const Place place = place_of(to);
  const bool is_written = transfer_all(from.size(), [&](size_t done) {
    return os::write_at(place.descriptor, from.subspan(done),
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
