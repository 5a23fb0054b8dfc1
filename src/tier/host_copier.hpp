// HostCopier: copies blocks between two places of the host.
#pragma once

#include <memory>

#include "tier/block_copier.hpp"

namespace kvx::tier {

// From the first place to the second one when blocks are stored, and back. A place is the memory of
// files, which outlives the copier, or where it is null, memory.
std::unique_ptr<BlockCopier> make_host_copier(FileMemory* first, FileMemory* second);

}  // namespace kvx::tier
