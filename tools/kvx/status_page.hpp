// Which format works in which verb on which backend, read from the kernel tables.
#pragma once

#include <string>

namespace kvx::tool {

std::string status_text(bool color);

// docs/status.md, byte for byte. The same on every machine: it says what is built, not what this
// processor runs.
std::string status_markdown();

}  // namespace kvx::tool
