// What a cache file holds, in numbers, and whether all of it is whole.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tier/cache_file.hpp"

namespace kvx::tier {

struct KindSummary {
  int64_t num_block_copies = 0;
  int64_t memory_bytes = 0;  // of the block copies in a cache
  int64_t stored_bytes = 0;  // in the file
};

// One a kind, in the index's order.
std::vector<KindSummary> summarize_kinds(const FileIndex& index);

// Tokens of the sequence whose last block this is.
int64_t num_tokens_of(const FileIndex& index, int32_t last_block);

// Reads every block copy. INVALID_ARGUMENT: how many are bad, and the first, or how many bytes
// follow the file's end; the message calls the file `path`.
Status check_block_copies(CacheFileReader& file, const std::string& path);

}  // namespace kvx::tier
