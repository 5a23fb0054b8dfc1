// whole_file: small files that are read and written as a whole.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace kvx::tier {

// What a failed call of the operating system (errno) says of a file.
Error file_error(const std::string& path, std::string_view what);

// So that a file's new name outlives a power cut. INVALID_ARGUMENT: the folder cannot be synced.
Status sync_folder_of(const std::string& path);

// Whether a file may be written at the path: a device or a pipe would be replaced by a file, and so
// would a circle of links. INVALID_ARGUMENT says why not.
Status check_place(const std::string& path);

// The file's bytes. INVALID_ARGUMENT: it cannot be read, is no regular file, or has more than
// most_bytes.
Result<std::vector<uint8_t>> read_whole_file(const std::string& path, int64_t most_bytes);

// Writes a temporary file beside `path`, syncs and renames it. Until then, and when anything fails,
// what was at `path` before stays there whole. INVALID_ARGUMENT: it cannot be written.
Status write_whole_file(const std::string& path, std::span<const uint8_t> bytes);

}  // namespace kvx::tier
