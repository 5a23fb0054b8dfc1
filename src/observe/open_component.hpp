// open_component: libkvx_observe.so, opened at the first use and never closed.
#pragma once

#include "core/result.hpp"
#include "observe/component.h"

namespace kvx::observe {

// UNSUPPORTED: open_component_library's.
Result<const kvx_observe_functions_t*> open_component();

}  // namespace kvx::observe
