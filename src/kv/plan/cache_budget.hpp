// A cache's memory budget in engines' words, in bytes.
#pragma once

#include "kv/kv_cache.hpp"

namespace kvx::kv {

// What cache::parse_memory_budget reads: "4GiB", a number of blocks, or a share of available_bytes
// as "0.8". A block is all that block_size tokens take in a sequence of max_tokens_per_sequence:
// every layer group's regions, scales and the full-precision window's share. INVALID_ARGUMENT:
// another text, or a configuration that KvCache::create refuses; OUT_OF_RANGE: less than a block.
Result<int64_t> cache_budget_bytes(const KvCacheConfig& config, std::string_view budget,
                                   int64_t available_bytes);

}  // namespace kvx::kv
