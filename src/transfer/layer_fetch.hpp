// fetch_layers: layer files of another process (folder_server.hpp), by their names, layer by layer
// as they come to be.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/result.hpp"
#include "transfer/messages.hpp"

namespace kvx::transfer {

inline constexpr int64_t kMostFileBytes = int64_t{1} << 30;

struct FetchOptions {
  std::string endpoint;        // the server's
  std::string folder;          // where NAME.kvx is written
  int64_t timeout_ms = 30000;  // without any answer; 1 to a day
  int64_t wait_ms = 0;         // for a layer that is not there yet, after the last; 0 to a day
  std::string fingerprint;     // that the server's files must have
  // These heads of every page alone, and the fingerprint of files that have no others.
  HeadRange heads;
  std::string fingerprint_of_heads;
};

struct FetchReport {
  int64_t num_files = 0;        // of the first names, one after the other: all of these are there
  int64_t bytes = 0;            // that came over the endpoint
  int64_t num_asked_again = 0;  // requests without an answer in time
  std::string problem;          // of the file after these; empty: it was not there
};

// INVALID_ARGUMENT: anything but 1 to 128 letters, digits, '-' and '_'.
Status check_file_name(const std::string& name);

// Fetches the files, a layer of many at a time, until one is not there. A file has its name once it
// is whole; its records' checksums hold then, and its fingerprint, and nothing else of it was
// checked. INVALID_ARGUMENT: a name, an option, a folder that cannot be written, or a server that
// refuses; INCOMPATIBLE: files of another fingerprint (the message names both sides), or a server
// of another version; UNSUPPORTED: nobody answers, or no libkvx_transfer.so. Files that came before
// an error are there.
Result<FetchReport> fetch_layers(const FetchOptions& options, std::span<const std::string> names);

}  // namespace kvx::transfer
