// Checks of a v1 cache descriptor and of the key and value tensors beside it.
#pragma once

#include "api/checks/deferred_errors.hpp"
#include "api/checks/v1_views.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// Checks size, counts, layouts, shapes and strides. INVALID_ARGUMENT or INCOMPATIBLE names the
// field. What this build does not support is added to deferred_errors.
Result<CacheView> check_cache(const kvx_cache_desc_t* cache, DeferredErrors& deferred_errors);

// Checks the size fields of an IO descriptor and of its tensors.
Status check_io_sizes(const kvx_kv_io_desc_t& io);

// Checks key and value of num_tokens tokens: [num_tokens, num_heads, head_dim], or padded
// [num_sequences, num_tokens / num_sequences, num_heads, head_dim]. num_sequences 0 accepts any
// division of num_tokens.
Result<IoView> check_io(const kvx_kv_io_desc_t& io, int64_t num_sequences, const CacheView& cache,
                        DeferredErrors& deferred_errors);

// INVALID_ARGUMENT: a caller's tensor overlaps [begin, begin + bytes) of the cache.
Status check_apart(const IoView& io, const void* begin, int64_t bytes, std::string_view name);
// INVALID_ARGUMENT: a caller's tensor overlaps any byte of the cache's K or V.
Status check_apart(const IoView& io, const CacheView& cache);

}  // namespace kvx::boundary
