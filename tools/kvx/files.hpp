// Files that appear whole or not at all, and text files read whole.
#pragma once

#include <span>
#include <string>

#include "core/result.hpp"

namespace kvx::tool {

// INVALID_ARGUMENT when `path` could not be written later: its folder is missing or closed, or it
// is a folder itself. field: the option's name, for the message.
Status check_can_write(const std::string& field, const std::string& path);

// check_can_write for a file that is replaced as a whole: a device or a pipe is refused too.
Status check_can_replace(const std::string& field, const std::string& path);

// An option and the file that it names; an empty path where it was not given.
struct OutputFile {
  const char* field;
  const std::string& path;
};
// check_can_write of all that were given. INVALID_ARGUMENT also when two are the same file, which
// the last one written would have alone.
Status check_outputs(std::span<const OutputFile> outputs);

// Writes beside `path` and renames: a reader sees the old file or the new one, never a part. A link
// stays a link, and a device or pipe is written as it is.
Status write_file(const std::string& field, const std::string& path, std::string_view content);

// What stands behind the path's last slash.
std::string file_name(const std::string& path);

// INVALID_ARGUMENT when the file is missing, is a folder, or cannot be read.
Result<std::string> read_file(const std::string& field, const std::string& path);

}  // namespace kvx::tool
