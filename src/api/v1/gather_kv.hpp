// kvx_gather_kv's work, for all the functions that share it.
#pragma once

#include <optional>

#include "api/v1/views.hpp"
#include "core/result.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// only: cache and IO are of this type, or the call is UNSUPPORTED. stream: of calls with a GPU's
// memory.
Status gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                 std::optional<Element> only, void* stream);

}  // namespace kvx::boundary
