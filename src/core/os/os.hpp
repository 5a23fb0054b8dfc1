// os: what kvx asks of the operating system: files at offsets, folders, processes, memory, shared
// libraries. POSIX's calls are in posix.cpp, Windows' in windows.cpp. Sockets have a header of
// their own (tier/store/socket/socket.hpp).
//
// A call that fails returns what its comment says, and errno has the reason on both systems.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace kvx::os {

// ---- files, by descriptors

enum class Open : uint8_t {
  kRead,
  kWrite,
  kReadWrite,
  kNew,  // a file that is not there yet, for reading and writing by its owner
  kAny,  // one that is there, or a new one that everybody may read; for reading and writing
};
enum class Links : uint8_t { kFollow, kRefuse };

// Negative: it cannot be opened. Descriptors are not inherited by other programs, and opening a
// pipe does not wait.
int open_file(const std::string& path, Open how, Links links = Links::kFollow);
// A file of a folder that has no name, or loses it when it is closed. Negative: no such file.
int open_unnamed(const std::string& folder);
void close_file(int descriptor);

struct FileFacts {
  bool is_regular = false;
  int64_t bytes = 0;
};
std::optional<FileFacts> facts_of(int descriptor);
std::optional<FileFacts> facts_of(const std::string& path);

// What changes when a file's bytes change, or another file gets its name.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t number = 0;
  int64_t bytes = 0;
  int64_t written_at = 0;  // in units of the system's own
  int64_t changed_at = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};
std::optional<FileIdentity> identity_of(const std::string& path);

// Bytes moved, perhaps fewer than asked for; 0: the file has ended; negative: an error.
int64_t read_at(int descriptor, std::span<uint8_t> to, int64_t offset);
int64_t write_at(int descriptor, std::span<const uint8_t> from, int64_t offset);

// False: it failed. reserve_file() takes the disk's room where the file system can do that.
bool resize_file(int descriptor, int64_t bytes);
bool reserve_file(int descriptor, int64_t bytes);
bool sync_file(int descriptor);
// Locks the whole file for this descriptor until it is closed; false: another one has the lock.
bool try_lock_file(int descriptor);

// ---- names of files. False: it failed.

// A file that is there under the new name is replaced at once; on Windows only while nobody has it
// open.
bool rename_file(const std::string& from, const std::string& to);
bool remove_file(const std::string& path);
// Writes down the names in a folder. Windows keeps them without being asked.
bool sync_folder(const std::string& folder);
// Whether a call has failed for want of room. error: its errno.
bool is_no_room(int error);

// ---- processes

int64_t process_id();
bool is_process_gone(int64_t id);

// ---- memory

int64_t main_memory_bytes();
// Zeroed, on huge pages where it is large and there are some; null: there is none.
uint8_t* map_zeroed(int64_t bytes);
void unmap(uint8_t* data, int64_t bytes);
// The bytes of a file, which has so many; null: no addresses.
uint8_t* map_file(int descriptor, int64_t bytes);
void unmap_file(uint8_t* data, int64_t bytes);
// Memory that processes share by the names of files, a folder.
std::string shared_memory_folder();

// ---- shared libraries

// What a component's library is called: "libkvx_observe.so.1".
std::string component_file(std::string_view component);
// Where the system's loader looks beside its own folders, for messages: a variable's name.
std::string_view library_path_variable();
// Null: library_problem() says why.
void* open_library(const std::string& file);
void* symbol_of(void* library, const std::string& name);
std::string library_problem();

}  // namespace kvx::os
