// The operating system's calls, as POSIX has them. Huge pages, unnamed files and reserved room are
// Linux' alone.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "core/checked.hpp"
#include "core/log.hpp"
#include "core/os/os.hpp"

namespace kvx::os {
namespace {

constexpr mode_t kOwnerAlone = 0600;
constexpr mode_t kAllMayRead = 0644;

int flags_of(Open how) {
  switch (how) {
    case Open::kRead:
      return O_RDONLY | O_NONBLOCK;
    case Open::kWrite:
      return O_WRONLY | O_NONBLOCK;
    case Open::kReadWrite:
      return O_RDWR | O_NONBLOCK;
    case Open::kNew:
      return O_RDWR | O_CREAT | O_EXCL;
    case Open::kAny:
      return O_RDWR | O_CREAT | O_NONBLOCK;
  }
  return O_RDONLY;
}

std::optional<FileFacts> facts_of(int result, const struct stat& facts) {
  if (result != 0) return std::nullopt;
  return FileFacts{S_ISREG(facts.st_mode), facts.st_size};
}

}  // namespace

int open_file(const std::string& path, Open how, Links links) {
  const int refused = links == Links::kRefuse ? O_NOFOLLOW : 0;
  return open(path.c_str(), flags_of(how) | O_CLOEXEC | refused,
              how == Open::kAny ? kAllMayRead : kOwnerAlone);
}

// Without a name from the start; where the file system has no such files, with one for a moment.
int open_unnamed(const std::string& folder) {
#ifdef O_TMPFILE
  const int unnamed = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kOwnerAlone);
  if (unnamed >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return unnamed;
#endif
  std::string name = folder + "/kvx-tier-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

void close_file(int descriptor) {
  close(descriptor);
}

std::optional<FileFacts> facts_of(int descriptor) {
  struct stat facts;
  return facts_of(fstat(descriptor, &facts), facts);
}

std::optional<FileFacts> facts_of(const std::string& path) {
  struct stat facts;
  return facts_of(stat(path.c_str(), &facts), facts);
}

std::optional<FileIdentity> identity_of(const std::string& path) {
  struct stat facts;
  if (stat(path.c_str(), &facts) != 0) return std::nullopt;
  const auto nanoseconds = [](const timespec& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
#ifdef __APPLE__
  const timespec& written = facts.st_mtimespec;
  const timespec& changed = facts.st_ctimespec;
#else
  const timespec& written = facts.st_mtim;
  const timespec& changed = facts.st_ctim;
#endif
  return FileIdentity{static_cast<uint64_t>(facts.st_dev), facts.st_ino, facts.st_size,
                      nanoseconds(written), nanoseconds(changed)};
}

int64_t read_at(int descriptor, std::span<uint8_t> to, int64_t offset) {
  return pread(descriptor, to.data(), to.size(), offset);
}

int64_t write_at(int descriptor, std::span<const uint8_t> from, int64_t offset) {
  return pwrite(descriptor, from.data(), from.size(), offset);
}

bool resize_file(int descriptor, int64_t bytes) {
  return ftruncate(descriptor, bytes) == 0;
}

// A file system that cannot keep room makes a file that takes it as it is written.
bool reserve_file(int descriptor, int64_t bytes) {
#ifdef __linux__
  while (fallocate(descriptor, 0, 0, bytes) != 0) {
    if (errno == EOPNOTSUPP) return resize_file(descriptor, bytes);
    if (errno != EINTR) return false;
  }
  return true;
#else
  return resize_file(descriptor, bytes);
#endif
}

bool sync_file(int descriptor) {
#ifdef F_FULLFSYNC  // macOS, whose fsync() leaves bytes in the disk's cache
  if (fcntl(descriptor, F_FULLFSYNC) == 0) return true;
#endif
  return fsync(descriptor) == 0;
}

bool try_lock_file(int descriptor) {
  return flock(descriptor, LOCK_EX | LOCK_NB) == 0;
}

bool rename_file(const std::string& from, const std::string& to) {
  return std::rename(from.c_str(), to.c_str()) == 0;
}

bool remove_file(const std::string& path) {
  return unlink(path.c_str()) == 0;
}

bool sync_folder(const std::string& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool is_synced = fsync(descriptor) == 0;
  const int error = errno;
  close(descriptor);
  errno = error;
  return is_synced;
}

bool is_no_room(int error) {
  return error == ENOSPC || error == EDQUOT || error == EFBIG;
}

int64_t process_id() {
  return getpid();
}

bool is_process_gone(int64_t id) {
  return kill(static_cast<pid_t>(id), 0) != 0 && errno == ESRCH;
}

int64_t main_memory_bytes() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

uint8_t* map(int64_t bytes) {
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<uint8_t*>(data);
}

// A huge page must begin on its own size: one page too much is mapped and the ends are given back.
uint8_t* map_on_huge_pages(int64_t bytes) {
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);  // 16 KiB on Apple's processors
  const auto rounded = (CheckedSize(bytes) + (page_bytes - 1)).get();
  const auto with_spare = (CheckedSize(bytes) + (page_bytes - 1) + kHugePageBytes).get();
  if (!rounded || !with_spare) return nullptr;
  const int64_t kept = *rounded / page_bytes * page_bytes;
  uint8_t* mapped = map(kept + kHugePageBytes);
  if (!mapped) return nullptr;
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped));
  const int64_t before = round_up(address, kHugePageBytes) - address;
  if (before > 0) munmap(mapped, before);
  if (before < kHugePageBytes) munmap(mapped + before + kept, kHugePageBytes - before);
#ifdef MADV_HUGEPAGE
  // Advice only: without huge pages the memory works the same.
  if (madvise(mapped + before, kept, MADV_HUGEPAGE) != 0) {
    log(LogLevel::kWarning, "no huge pages for {} bytes: {}", bytes,
        std::generic_category().message(errno));
  }
#endif
  return mapped + before;
}

}  // namespace

uint8_t* map_zeroed(int64_t bytes) {
  return bytes < kHugePageBytes ? map(bytes) : map_on_huge_pages(bytes);
}

void unmap(uint8_t* data, int64_t bytes) {
  munmap(data, bytes);
}

uint8_t* map_file(int descriptor, int64_t bytes) {
  void* const mapped =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<uint8_t*>(mapped);
}

void unmap_file(uint8_t* data, int64_t bytes) {
  munmap(data, bytes);
}

#ifdef __APPLE__

std::string shared_memory_folder() {
  return "/tmp";  // files: it has no folder that is memory
}

std::string component_file(std::string_view component) {
  return fmt::format("libkvx_{}.1.dylib", component);
}

std::string_view library_path_variable() {
  return "DYLD_LIBRARY_PATH";
}

#else

std::string shared_memory_folder() {
  return "/dev/shm";
}

std::string component_file(std::string_view component) {
  return fmt::format("libkvx_{}.so.1", component);
}

std::string_view library_path_variable() {
  return "LD_LIBRARY_PATH";
}

#endif

void* open_library(const std::string& file) {
  return dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
}

void* symbol_of(void* library, const std::string& name) {
  return dlsym(library, name.c_str());
}

std::string library_problem() {
  const char* const text = dlerror();
  return text == nullptr ? "no reason is known" : text;
}

}  // namespace kvx::os
