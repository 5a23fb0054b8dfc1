// Reads a caller's description of TurboMind's pools.
#pragma once

#include "core/result.hpp"
#include "engines/turbomind/layout.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// INVALID_ARGUMENT names the field of `pools`.
Result<engines::turbomind::PoolLayout> read_pool_layout(const kvx_turbomind_pools_t& args);
// Strides of 0 become a block's bytes. layer_blocks() checks the rest.
Result<engines::turbomind::Pools> read_pools(const kvx_turbomind_pools_t& args,
                                             const engines::turbomind::PoolLayout& layout);

}  // namespace kvx::boundary
