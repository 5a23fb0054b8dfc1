// Checks of a v1 cache descriptor and of the key and value tensors beside it.
#pragma once

#include "api/checks/deferred_errors.hpp"
#include "api/v1/views.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// Size, counts, layouts, shapes and strides. INVALID_ARGUMENT or INCOMPATIBLE names the field; what
// this build cannot do is added to the deferred_errors.
Result<CacheView> check_cache(const kvx_cache_desc_t* cache, DeferredErrors& deferred_errors);

// The sizes of an IO descriptor and of its tensors.
Status check_io_sizes(const kvx_kv_io_desc_t& io);

// Key and value of num_tokens tokens: [num_tokens, heads, head_dim], or padded
// [num_sequences, num_tokens / num_sequences, heads, head_dim] (num_sequences 0: any that fits).
Result<IoView> check_io(const kvx_kv_io_desc_t& io, int64_t num_sequences, const CacheView& cache,
                        DeferredErrors& deferred_errors);

// INVALID_ARGUMENT: a caller's tensor lies over [begin, begin + bytes) of the cache.
Status check_apart(const IoView& io, const void* begin, int64_t bytes, std::string_view name);
// Likewise for the whole of K and V.
Status check_apart(const IoView& io, const CacheView& cache);

}  // namespace kvx::boundary
