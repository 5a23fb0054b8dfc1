// open_component: libkvx_transfer.so, opened at the first use and never closed.
#pragma once

#include "core/result.hpp"
#include "transfer/component.h"

namespace kvx::transfer {

// UNSUPPORTED: open_component_library's.
Result<const kvx_transfer_functions_t*> open_component();

}  // namespace kvx::transfer
