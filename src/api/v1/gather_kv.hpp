// kvx_gather_kv, for all the exported functions that share it.
#pragma once

#include <optional>

#include "api/checks/v1_views.hpp"
#include "core/result.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// only: cache and IO have this type, or the call is UNSUPPORTED. stream: used where the cache is in
// a GPU's memory.
Status gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                 std::optional<Element> only, void* stream);

}  // namespace kvx::boundary
