// Temporary files of cache files: FILE.<pid>.<number>.tmp, locked by their writer while it lives.
// The writer was killed if its process is gone and the lock is free: what it left is abandoned.
#pragma once

#include <string>
#include <vector>

#include "core/result.hpp"

namespace kvx::tier {

struct TemporaryFile {
  std::string path;
  int descriptor = -1;  // open for reading and writing, locked, empty
};

// The temporary file of a new writer of `place`. It takes over an abandoned one of the same place
// where there is one, and removes the others. INVALID_ARGUMENT: it cannot be made; the message
// names `place`.
Result<TemporaryFile> create_temporary(const std::string& place);

// The abandoned temporary files in a folder, in the order of their names; of one cache file where
// `name` is not empty, else of all. INVALID_ARGUMENT: the folder cannot be read.
Result<std::vector<std::string>> abandoned_temporaries(const std::string& folder,
                                                       const std::string& name);

struct PruneReport {
  std::vector<std::string> removed;
  int64_t bytes = 0;  // of the removed files
};

// Removes the abandoned temporary files: those of every cache file where `path` is a folder, else
// those of the file `path`, which need not exist. INVALID_ARGUMENT: a folder that cannot be read,
// or a file that cannot be removed.
Result<PruneReport> prune_temporaries(const std::string& path);

}  // namespace kvx::tier
