// As every component (core/component_library.hpp).
#include "observe/open_component.hpp"

#include "core/component_library.hpp"

namespace kvx::observe {

Result<const kvx_observe_functions_t*> open_component() {
  static const Result<const kvx_observe_functions_t*> opened =
      open_component_library<kvx_observe_functions_t>("observe", KVX_OBSERVE_VERSION);
  return opened;
}

}  // namespace kvx::observe
