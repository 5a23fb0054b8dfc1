// The operating system's calls, as Windows has them. Descriptors are those of its C library, over
// handles that others may rename and remove while they are open, as POSIX allows.
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <fcntl.h>
#include <io.h>
#include <windows.h>

#include <cerrno>

#include "core/os/os.hpp"
#include "core/random_id.hpp"
#include "core/result.hpp"

namespace kvx::os {
namespace {

// Sets errno to what POSIX calls the last error.
void set_errno() {
  switch (GetLastError()) {
    case ERROR_FILE_NOT_FOUND:
    case ERROR_PATH_NOT_FOUND:
    case ERROR_INVALID_NAME:
      errno = ENOENT;
      break;
    case ERROR_FILE_EXISTS:
    case ERROR_ALREADY_EXISTS:
      errno = EEXIST;
      break;
    case ERROR_ACCESS_DENIED:
    case ERROR_SHARING_VIOLATION:
    case ERROR_LOCK_VIOLATION:
      errno = EACCES;
      break;
    case ERROR_DISK_FULL:
    case ERROR_HANDLE_DISK_FULL:
      errno = ENOSPC;
      break;
    case ERROR_TOO_MANY_OPEN_FILES:
      errno = EMFILE;
      break;
    case ERROR_NOT_ENOUGH_MEMORY:
    case ERROR_COMMITMENT_LIMIT:
      errno = ENOMEM;
      break;
    case ERROR_INVALID_HANDLE:
      errno = EBADF;
      break;
    default:
      errno = EIO;
  }
}

bool succeeds(BOOL result) {
  if (result != 0) return true;
  set_errno();
  return false;
}

HANDLE handle_of(int descriptor) {
  return reinterpret_cast<HANDLE>(_get_osfhandle(descriptor));
}

constexpr DWORD kShared = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;

int descriptor_of(HANDLE handle) {
  if (handle == INVALID_HANDLE_VALUE) {
    set_errno();
    return -1;
  }
  const int descriptor =
      _open_osfhandle(reinterpret_cast<intptr_t>(handle), _O_BINARY | _O_NOINHERIT);
  if (descriptor < 0) CloseHandle(handle);
  return descriptor;
}

DWORD access_of(Open how) {
  if (how == Open::kRead) return GENERIC_READ;
  return how == Open::kWrite ? GENERIC_WRITE : GENERIC_READ | GENERIC_WRITE;
}

DWORD existence_of(Open how) {
  if (how == Open::kNew) return CREATE_NEW;
  return how == Open::kAny ? OPEN_ALWAYS : OPEN_EXISTING;
}

// Where a call at an offset begins, which it takes as if it were of an asynchronous call.
OVERLAPPED at(int64_t offset) {
  OVERLAPPED place = {};
  place.Offset = static_cast<DWORD>(offset);
  place.OffsetHigh = static_cast<DWORD>(offset >> 32);
  return place;
}

// The most bytes of one call.
DWORD at_once(size_t bytes) {
  constexpr size_t kMost = size_t{1} << 30;
  return static_cast<DWORD>(bytes < kMost ? bytes : kMost);
}

}  // namespace

int open_file(const std::string& path, Open how, Links links) {
  const DWORD refused = links == Links::kRefuse ? FILE_FLAG_OPEN_REPARSE_POINT : 0;
  return descriptor_of(CreateFileA(path.c_str(), access_of(how), kShared, nullptr,
                                   existence_of(how), FILE_ATTRIBUTE_NORMAL | refused, nullptr));
}

int open_unnamed(const std::string& folder) {
  const std::string path = fmt::format("{}/kvx-tier-{:016x}", folder, random_id());
  return descriptor_of(CreateFileA(path.c_str(), GENERIC_READ | GENERIC_WRITE, kShared, nullptr,
                                   CREATE_NEW, FILE_ATTRIBUTE_TEMPORARY | FILE_FLAG_DELETE_ON_CLOSE,
                                   nullptr));
}

void close_file(int descriptor) {
  _close(descriptor);
}

std::optional<FileFacts> facts_of(int descriptor) {
  const HANDLE handle = handle_of(descriptor);
  LARGE_INTEGER bytes;
  if (!succeeds(GetFileSizeEx(handle, &bytes))) return std::nullopt;
  return FileFacts{GetFileType(handle) == FILE_TYPE_DISK, bytes.QuadPart};
}

std::optional<FileFacts> facts_of(const std::string& path) {
  WIN32_FILE_ATTRIBUTE_DATA facts;
  if (!succeeds(GetFileAttributesExA(path.c_str(), GetFileExInfoStandard, &facts))) {
    return std::nullopt;
  }
  constexpr DWORD kOther = FILE_ATTRIBUTE_DIRECTORY | FILE_ATTRIBUTE_DEVICE;
  return FileFacts{(facts.dwFileAttributes & kOther) == 0,
                   (int64_t{facts.nFileSizeHigh} << 32) | facts.nFileSizeLow};
}

std::optional<FileIdentity> identity_of(const std::string& path) {
  const int descriptor = open_file(path, Open::kRead);
  if (descriptor < 0) return std::nullopt;
  BY_HANDLE_FILE_INFORMATION facts;
  const bool is_known = succeeds(GetFileInformationByHandle(handle_of(descriptor), &facts));
  close_file(descriptor);
  if (!is_known) return std::nullopt;
  const auto number = [](DWORD high, DWORD low) { return (uint64_t{high} << 32) | low; };
  const auto time = [&number](const FILETIME& from) {
    return static_cast<int64_t>(number(from.dwHighDateTime, from.dwLowDateTime));
  };
  return FileIdentity{facts.dwVolumeSerialNumber, number(facts.nFileIndexHigh, facts.nFileIndexLow),
                      static_cast<int64_t>(number(facts.nFileSizeHigh, facts.nFileSizeLow)),
                      time(facts.ftLastWriteTime), time(facts.ftCreationTime)};
}

int64_t read_at(int descriptor, std::span<uint8_t> to, int64_t offset) {
  OVERLAPPED place = at(offset);
  DWORD done = 0;
  if (ReadFile(handle_of(descriptor), to.data(), at_once(to.size()), &done, &place)) return done;
  if (GetLastError() == ERROR_HANDLE_EOF) return 0;
  set_errno();
  return -1;
}

int64_t write_at(int descriptor, std::span<const uint8_t> from, int64_t offset) {
  OVERLAPPED place = at(offset);
  DWORD done = 0;
  const BOOL result =
      WriteFile(handle_of(descriptor), from.data(), at_once(from.size()), &done, &place);
  return succeeds(result) ? int64_t{done} : -1;
}

bool resize_file(int descriptor, int64_t bytes) {
  FILE_END_OF_FILE_INFO end;
  end.EndOfFile.QuadPart = bytes;
  return succeeds(
      SetFileInformationByHandle(handle_of(descriptor), FileEndOfFileInfo, &end, sizeof end));
}

// NTFS takes the room of a file that is not sparse.
bool reserve_file(int descriptor, int64_t bytes) {
  return resize_file(descriptor, bytes);
}

bool sync_file(int descriptor) {
  return succeeds(FlushFileBuffers(handle_of(descriptor)));
}

// What is locked cannot be read: a byte that no file has stands for all.
bool try_lock_file(int descriptor) {
  OVERLAPPED place = at(int64_t{1} << 62);
  return succeeds(LockFileEx(handle_of(descriptor),
                             LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &place));
}

bool rename_file(const std::string& from, const std::string& to) {
  return succeeds(MoveFileExA(from.c_str(), to.c_str(), MOVEFILE_REPLACE_EXISTING));
}

bool remove_file(const std::string& path) {
  return succeeds(DeleteFileA(path.c_str()));
}

bool sync_folder(const std::string&) {
  return true;
}

bool is_no_room(int error) {
  return error == ENOSPC || error == EFBIG;
}

int64_t process_id() {
  return GetCurrentProcessId();
}

bool is_process_gone(int64_t id) {
  const HANDLE process = OpenProcess(SYNCHRONIZE, FALSE, static_cast<DWORD>(id));
  if (process == nullptr) return GetLastError() == ERROR_INVALID_PARAMETER;
  const bool has_ended = WaitForSingleObject(process, 0) == WAIT_OBJECT_0;
  CloseHandle(process);
  return has_ended;
}

int64_t main_memory_bytes() {
  MEMORYSTATUSEX memory = {};
  memory.dwLength = sizeof memory;
  return GlobalMemoryStatusEx(&memory) ? static_cast<int64_t>(memory.ullTotalPhys) : 0;
}

// Large pages want a privilege that few programs have.
uint8_t* map_zeroed(int64_t bytes) {
  return static_cast<uint8_t*>(
      VirtualAlloc(nullptr, static_cast<size_t>(bytes), MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
}

void unmap(uint8_t* data, int64_t) {
  VirtualFree(data, 0, MEM_RELEASE);
}

uint8_t* map_file(int descriptor, int64_t bytes) {
  const HANDLE mapping =
      CreateFileMappingA(handle_of(descriptor), nullptr, PAGE_READWRITE,
                         static_cast<DWORD>(bytes >> 32), static_cast<DWORD>(bytes), nullptr);
  if (mapping == nullptr) {
    set_errno();
    return nullptr;
  }
  void* const mapped =
      MapViewOfFile(mapping, FILE_MAP_ALL_ACCESS, 0, 0, static_cast<size_t>(bytes));
  if (mapped == nullptr) set_errno();
  CloseHandle(mapping);  // the view keeps it
  return static_cast<uint8_t*>(mapped);
}

void unmap_file(uint8_t* data, int64_t) {
  UnmapViewOfFile(data);
}

// Files of the folder for temporary ones stay in memory while there is some.
std::string shared_memory_folder() {
  char folder[MAX_PATH + 1];
  const DWORD length = GetTempPathA(sizeof folder, folder);
  return length == 0 ? "." : std::string(folder, length);
}

std::string component_file(std::string_view component) {
  return fmt::format("kvx_{}-1.dll", component);
}

std::string_view library_path_variable() {
  return "PATH";
}

void* open_library(const std::string& file) {
  return reinterpret_cast<void*>(LoadLibraryA(file.c_str()));
}

void* symbol_of(void* library, const std::string& name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name.c_str()));
}

std::string library_problem() {
  return fmt::format("error {} of Windows", GetLastError());
}

}  // namespace kvx::os
