// kvx_write_kv's work, for all the functions that share it.
#pragma once

#include <optional>

#include "api/v1/views.hpp"
#include "core/result.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// only: cache and IO are of this type, or the call is UNSUPPORTED. stream: of calls with a GPU's
// memory.
Status write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                std::optional<Element> only, void* stream);

}  // namespace kvx::boundary
