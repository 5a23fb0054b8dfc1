// fetch_files: cache files of another process (folder_server.hpp), by their names.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/result.hpp"

namespace kvx::transfer {

inline constexpr int64_t kMostFileBytes = int64_t{1} << 30;

struct FetchOptions {
  std::string endpoint;        // the server's
  std::string folder;          // where NAME.kvx is written
  int64_t timeout_ms = 30000;  // without any answer; 1 to a day
  int64_t wait_ms = 0;         // for a file that is not there yet, after the last; 0 to a day
};

struct FetchReport {
  int64_t num_files = 0;  // of the first names, one after the other: all of these are there
  int64_t bytes = 0;      // that came over the endpoint
};

// INVALID_ARGUMENT: anything but 1 to 128 letters, digits, '-' and '_'.
Status check_file_name(const std::string& name);

// Fetches the files in their order, several at a time, until one is not there. What a file holds is
// its reader's to check. INVALID_ARGUMENT: a name, an option, a folder that cannot be written, or a
// server that refuses; UNSUPPORTED: nobody answers, or no libkvx_transfer.so. Files that came
// before an error are there.
Result<FetchReport> fetch_files(const FetchOptions& options, std::span<const std::string> names);

}  // namespace kvx::transfer
